"""Activations and optimizer state in host memory: seconds of their way, and the least share that fits."""
