"""How much memory each rank of a run on this machine needs."""
