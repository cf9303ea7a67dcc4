"""Planted faults: what `phalanx verify` must find."""
