"""The best mapping of a job on a cluster."""
