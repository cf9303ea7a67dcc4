"""The oracle: any mapping against one rank, in float64; planted faults."""
