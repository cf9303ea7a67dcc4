"""Hugging Face checkpoints to runs and back."""
