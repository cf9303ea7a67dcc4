"""A run's own program on a clock, operation by operation."""
