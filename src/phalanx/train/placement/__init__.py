"""Experts that move while training runs."""
