"""Carries out one MoE layer: dispatch, experts, combine; one after the other, in chunks, tile by tile, or by fused kernels."""
