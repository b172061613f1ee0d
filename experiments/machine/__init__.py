"""What the profile of a machine is made of."""
