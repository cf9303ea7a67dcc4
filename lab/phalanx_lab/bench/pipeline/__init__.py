"""`phalanx bench pipeline`: what transfers beside passes gain."""
