"""`phalanx bench reshard` and `phalanx bench reshard-plan`: moves of sharded tensors."""
