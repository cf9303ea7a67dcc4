"""How communication and expert compute overlap inside one MoE layer, tile by tile: tiles, order, bytes, costs and the choice between schedules (arXiv 2502.19811)."""
