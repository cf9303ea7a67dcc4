"""Published measurements, and predictions beside them."""
