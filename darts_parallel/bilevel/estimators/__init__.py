"""What few bits cost in steps: trials from the initial weights, hard one-layer switches, slopes of mixtures."""
