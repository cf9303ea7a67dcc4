"""How long a step takes on a cluster, and what it holds in memory."""
