"""How long a plan takes and how much memory it needs. NumPy only, never torch."""
