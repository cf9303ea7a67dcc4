"""Carries out one rank's part of a reshard plan."""
