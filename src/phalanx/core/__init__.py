"""Names of things: errors, units, events, config sections. Standard library only."""
