"""Seconds and bytes of plans: the table of costs and its hard readings."""
