"""The jobs and clusters of FASOP's evaluation, and what its program was seen to print for them.

Source: FASOP (HPDC'24) and the settings in its published program. Bandwidths in bit/s.
"""

from dataclasses import dataclass

from experiments.fasop.setting import GIB, Job, NodeType, Offer

GPT2_XL = Job("GPT2-XL", hidden_size=1600, seq_len=1024, vocab_size=50257, num_heads=16,
              global_batch_size=64, num_blocks=48)  # fmt: skip
BERT = Job("BERT-345M", hidden_size=1024, seq_len=512, vocab_size=30522, num_heads=16,
           global_batch_size=256, num_blocks=24)  # fmt: skip
T5 = Job("T5-1.3B", hidden_size=1024, seq_len=512, vocab_size=30522, num_heads=32,
         global_batch_size=128, num_blocks=48, encoder_decoder=True)  # fmt: skip
"""FASOP's GPT2-XL has 16 heads, not the 25 of the model's authors; only memory depends on it."""


def _a100(inter_bandwidth: float) -> NodeType:
    return NodeType("A100-40GB", inter_bandwidth, 1840e9, 39.59 * GIB, 32.7726, label="A100")


def _a10(inter_bandwidth: float, intra_bandwidth: float, price: float) -> NodeType:
    memory = 22.20 * GIB
    return NodeType("A10", inter_bandwidth, intra_bandwidth, memory, price, shares_bus=True, label="A10")


NODES_OF_4 = Offer((_a100(40e9), _a10(40e9, 128e9, 8.144)), gpus_per_node=4)
NODES_OF_8 = Offer((_a100(400e9), _a10(100e9, 252e9, 9.773)), gpus_per_node=8)
"""Of the Pareto study."""
MOST_NODES = 8
"""Of either type in the Pareto study."""
JOB_STEPS = 12_500_000
"""Steps that the Pareto study pays for."""


@dataclass(frozen=True)
class Published:
    """What FASOP's program prints."""

    tp: int
    dp: int
    pp: int
    micro_batch_size: int
    layers_per_stage: tuple[int, ...]
    seconds: float


@dataclass(frozen=True)
class Case:
    """A job on a cluster."""

    name: str
    job: Job
    counts: tuple[int, int]
    """A100 and A10 nodes of four GPUs."""
    published: Published | None = None


_CLUSTERS = (
    ("Homo-small", (0, 4)),
    ("Homo-large", (0, 8)),
    ("Hetero-small", (1, 3)),
    ("Hetero-large", (1, 7)),
)
_PUBLISHED = {
    "BERT, Homo-small": Published(1, 16, 1, 4, (26,), 0.9546),
    "BERT, Hetero-small": Published(1, 4, 4, 8, (14, 5, 5, 2), 0.8197),
    "T5, Homo-large": Published(1, 4, 8, 2, (9, 8, 8, 6, 5, 4, 5, 5), 1.0178),
    "T5, Hetero-large": Published(1, 4, 8, 2, (15, 10, 5, 4, 4, 4, 4, 4), 0.9745),
    "GPT2-XL, Hetero-large": Published(1, 2, 16, 1, (4, 3, 3, 3, 2, 3, 3, 3, 3, 3, 3, 3, 3, 3, 4, 4), 1.0682),
}


def all_cases() -> list[Case]:
    """Every job on every cluster of nodes of four."""
    jobs = (("BERT", BERT), ("GPT2-XL", GPT2_XL), ("T5", T5))
    return [
        Case(f"{job_name}, {cluster}", job, counts, _PUBLISHED.get(f"{job_name}, {cluster}"))
        for job_name, job in jobs
        for cluster, counts in _CLUSTERS
    ]


def study_clusters() -> list[list[tuple[int, int]]]:
    """The clusters of the Pareto study, `(A100 nodes, A10 nodes)`, grouped by their number of nodes."""
    sizes = range(1, 2 * MOST_NODES + 1)
    return [
        [(fast, size - fast) for fast in range(max(0, size - MOST_NODES), min(size, MOST_NODES) + 1)]
        for size in sizes
    ]
