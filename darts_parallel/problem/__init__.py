"""Model, cluster and job in SI units, immutable."""
