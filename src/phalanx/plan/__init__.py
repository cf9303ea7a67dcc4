"""What should happen: pure functions of NumPy and the standard library that return frozen plans. Never torch."""
