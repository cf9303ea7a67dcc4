"""One optimizer step, and the loop around it."""
