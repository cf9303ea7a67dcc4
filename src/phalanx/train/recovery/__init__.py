"""A run that goes on when hosts are lost or join."""
