"""Saves and loads the state of a run by logical tensors, for any mapping and number of ranks."""
