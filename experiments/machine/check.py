"""The cost model with measured figures against the measured blocks."""

from darts_parallel.cost.table import build_tables
from darts_parallel.problem.problem import load_problem
from experiments.machine.compute import ComputeProfile


def block_errors(folder: str, name: str, compute: ComputeProfile) -> list[tuple[str, float, float]]:
    """Return words, and `predicted / measured - 1` of forward and backward, for every measured block.

    Args:
        folder: For `--config-dir`; holds the written device and cluster.
        name: Of the cluster.
        compute: What was measured; no block has a part in the fit.
    """
    result = []
    for layer in compute.blocks:
        width = layer.width
        problem = load_problem(
            ["model=gpt2_xl", f"cluster={name}", "training=toy", "training.fused_attention=false",
             "space=uniform", "space.pp=1", "space.tp=1",
             "space.num_micro_batches=1", "space.recompute=none", "space.zero_stage=0",
             f"model.hidden_size={width}", f"model.num_heads={max(width // 64, 1)}", "model.num_layers=1",
             f"model.max_seq_len={layer.seq_len}", f"training.seq_len={layer.seq_len}",
             "cluster.nodes.0.count=1", "cluster.nodes.0.gpus=1",
             f"training.precision={compute.gemms[0].precision}",
             f"training.global_batch_size={layer.micro_batch}"],
            config_dir=folder,
        )  # fmt: skip
        (table,) = build_tables(problem)
        forward, backward = float(table.forward[0, 0, 1, 0]), float(table.backward[0, 0, 1, 0])
        words = f"width {width}, {layer.micro_batch} x {layer.seq_len} tokens"
        result.append((words, forward / layer.forward_s - 1.0, backward / layer.backward_s - 1.0))
    return result
