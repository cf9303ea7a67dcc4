"""`phalanx gpu-check`: what to run first on a machine with one GPU, check by check, each in a process of its own."""
