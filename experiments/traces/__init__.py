"""Recorded training steps: reading them, and replaying their computation through the simulator."""
