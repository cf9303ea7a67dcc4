"""Gradients, master weights and moments of what a rank keeps."""
