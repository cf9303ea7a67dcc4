"""One rank's step, or its part of a move of state, as an ordered list of operations with ids."""
