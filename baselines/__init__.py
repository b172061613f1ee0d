"""Planners without gradients: exact ones, which prove a plan, and what people use today."""
