"""The decoder and its parts."""
