"""Carries plans out with torch.distributed and takes no decision. It knows no model."""
