"""Runs a plan on torch.distributed: `torchrun --nproc-per-node N -m darts_parallel.run plan=plan.json`."""
