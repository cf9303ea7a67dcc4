"""Triton programs of operations that are one launch each, imported by their wrappers when they are called."""
