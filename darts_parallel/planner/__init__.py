"""From a problem to a verified plan."""
