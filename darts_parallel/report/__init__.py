"""What people and files read of a plan."""
