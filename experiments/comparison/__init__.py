"""Share what the comparisons of planners need: problems, variants, runs and their reports."""
