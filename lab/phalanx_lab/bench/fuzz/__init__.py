"""`phalanx bench fuzz`: every file and message that Phalanx reads, changed at random; each must be read, or refused in a sentence."""
