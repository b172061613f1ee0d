"""The differentiable search: relaxation, descent, rounding, polishing."""
