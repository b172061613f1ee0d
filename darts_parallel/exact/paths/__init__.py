"""What bounds of simulated pipelines are made of: paths through a schedule, and splits placed as a V."""
