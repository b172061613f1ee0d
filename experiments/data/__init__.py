"""Measured runs, layer times and recorded steps with their sources, and the script that cleans them."""

from pathlib import Path

DATA = Path(__file__).parent
"""Folder of the data that ship."""
