"""Strategies and plans, which of them are legal, and the plan file."""
