"""Triton programs. Modules in here import `triton`; nothing imports them but the wrappers beside this package, when they are called."""
