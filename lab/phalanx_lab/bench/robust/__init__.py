"""`phalanx bench robust`: overlapped layers whose ranks are killed."""
