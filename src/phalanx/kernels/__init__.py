"""Fast operations on tensors, each beside its plain reference."""
