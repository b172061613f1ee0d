"""The upper level: the joint space of plans, its prices in seconds and steps, and what is proven of them."""
