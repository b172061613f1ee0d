"""A plan as a chain of layers: weights from its marginals, rounding by its best path."""
