"""Carries out one rank's part of a pipeline schedule, and what travels between stages."""
