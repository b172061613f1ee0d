"""The upper level: the joint space of plans, its prices in seconds and in steps, and what is proven of them."""
