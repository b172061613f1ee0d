"""FASOP's published program over measured layer times, and a faster search of its space."""
