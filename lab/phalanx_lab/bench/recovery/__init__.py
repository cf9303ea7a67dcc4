"""`phalanx bench recovery`: elastic recovery beside restarts from checkpoints."""
