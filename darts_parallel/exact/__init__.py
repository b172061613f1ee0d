"""Bounds, and solvers that prove their plans."""
