"""Measured runs, layer times and recorded steps with their sources, and the script that cleans them."""
