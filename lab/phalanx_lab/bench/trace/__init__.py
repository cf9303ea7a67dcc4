"""`phalanx bench trace`: a training step on a GPU that computes nothing, and what it would have asked of a real one."""
