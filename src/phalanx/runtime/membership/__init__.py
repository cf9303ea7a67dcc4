"""Who takes part in a run: generations of members, heartbeats, votes, the membership service and the supervisor of a host."""
