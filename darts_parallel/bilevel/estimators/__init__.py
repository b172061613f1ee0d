"""What few bits cost in steps: trials from initial weights, hard one-layer switches, slopes of mixtures."""
