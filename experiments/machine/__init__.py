"""Measure the parts of a machine's profile."""
