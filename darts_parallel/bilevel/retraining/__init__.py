"""Trainings from scratch by which plans are judged, and the uniform bits that they choose."""
