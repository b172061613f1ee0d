"""What the comparisons of planners share."""
