"""A made-up profile and offer for the tests of the FASOP baseline."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from darts_parallel.problem.layer_profiles import FORWARD_FILE, MULTIPLIER_FILE, read_profiles
from experiments.fasop.costs import CostModel
from experiments.fasop.setting import GIB, Job, NodeType, Offer

FAST, SLOW = "A100-40GB (x)", "A10 (y)"
OFFER = Offer(
    (
        NodeType(FAST, 40e9, 1800e9, 40 * GIB, 30.0, label="A100"),
        NodeType(SLOW, 40e9, 128e9, 24 * GIB, 8.0, shares_bus=True, label="A10"),
    ),
    gpus_per_node=2,
)


def job(blocks: int, *, batch: int = 8, halves: bool = False) -> Job:
    return Job("tiny", hidden_size=64, seq_len=32, vocab_size=100, num_heads=4, global_batch_size=batch,
               num_blocks=blocks, encoder_decoder=halves)  # fmt: skip


def write_profile(folder: Path, model: str, blocks: int, seed: int | None, *, halves: bool = False) -> None:
    """Layer times of both GPUs at tp 1, 2 and 4; without a seed 1 ms on the fast and 2 ms on the slow one."""
    rng = np.random.default_rng(seed)
    if halves:
        kinds = [
            "encoder_embedding",
            *["encoder"] * (blocks // 2),
            "decoder_embedding",
            *["decoder"] * (blocks // 2),
        ]
    else:
        kinds = ["embedding", *["transformer"] * blocks, "post_process"]
    lines = ["source,model,gpu,tp,layer_index,layer_kind,forward_s"]
    for gpu, base in ((FAST, 0.001), (SLOW, 0.002)):
        for tp in (1, 2, 4):
            scale = {kind: 1.0 if seed is None else rng.uniform(0.3, 1.5) for kind in sorted(set(kinds))}
            for index, kind in enumerate(kinds):
                lines.append(f"S,{model},{gpu},{tp},{index},{kind},{base * scale[kind]}")
    (folder / FORWARD_FILE).write_text("\n".join(lines) + "\n")
    rows = [f"{model},{gpu},{kind},1,1" for gpu in (FAST, SLOW) for kind in sorted(set(kinds))]
    (folder / MULTIPLIER_FILE).write_text(
        "\n".join(["model,gpu,layer_kind,micro_batch,multiplier", *rows]) + "\n"
    )


def cost_model(
    folder: Path, blocks: int, seed: int | None = None, *, batch: int = 8, halves: bool = False
) -> CostModel:
    write_profile(folder, "tiny", blocks, seed, halves=halves)
    return CostModel(job(blocks, batch=batch, halves=halves), OFFER, read_profiles(folder))


def without_memory(model: CostModel) -> CostModel:
    """The same costs where every GPU has one byte."""
    types = tuple(replace(kind, memory=1.0) for kind in model.offer.types)
    return CostModel(model.job, replace(model.offer, types=types), model.profiles)
