"""One file a benchmark, each against a baseline in the same run."""
