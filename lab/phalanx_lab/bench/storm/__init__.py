"""`phalanx bench storm`: faults of all kinds over a run that recovers."""
