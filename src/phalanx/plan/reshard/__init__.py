"""How a tensor moves from one layout to another: units, the bound, schedules between hosts, and messages between ranks (arXiv 2211.05322)."""
