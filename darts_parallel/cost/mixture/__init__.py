"""Costs of the routed experts of a mixture."""
