"""How many replicas each expert has, on which hosts they live, what losses that survives, and when experts should move."""
