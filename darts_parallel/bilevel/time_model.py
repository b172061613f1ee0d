"""Seconds per step of the virtual devices, differentiable in the candidates' weights.

They are read from the package's own cost table, which knows the bits of a strategy's collectives.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from darts_parallel.bilevel.candidates import Candidate, CandidateSet
from darts_parallel.bilevel.settings import TransformerShape
from darts_parallel.config import (
    ClusterConfig,
    Config,
    CostConfig,
    DeviceConfig,
    LinkConfig,
    ModelConfig,
    NodeGroupConfig,
    SearchConfig,
    SpaceConfig,
    TrainingConfig,
    require_member,
)
from darts_parallel.objective import RelaxedPlans, surrogate
from darts_parallel.problem import Problem
from darts_parallel.space import OuterSpace
from darts_parallel.strategy import LayerStrategy
from darts_parallel.table import CostTable, build_table

NETWORKS = {"slow": 0.5, "fast": 500.0}
"""GB/s of every link of the two invented clusters: communication is the bottleneck, or negligible."""
LATENCY_US = 0.2


@dataclass(frozen=True)
class TimeModel:
    """Seconds per step at one global batch size.

    `table` has one outer choice, one stage, the layers embedding, blocks, head and loss, and the
    blocks' candidates as strategies. The layers around the blocks are lossless.
    """

    table: CostTable
    choices: CandidateSet

    def seconds(self, weights: Tensor, edge_weights: Tensor) -> Tensor:
        """Expected seconds per step of R mixtures.

        Args:
            weights: Of the blocks' candidates, shape `(..., blocks, C)`.
            edge_weights: Of the tensor-parallel degrees of embedding, head and loss, shape `(..., 2, D)`.

        Returns:
            Shape `(...)`, float64.
        """
        first = torch.tensor([self._lossless(tp) for tp in self.degrees])
        edges = torch.zeros(*weights.shape[:-2], 2, weights.shape[-1], dtype=torch.float64)
        edges = edges.index_add(-1, first, edge_weights.double())
        # the loss is computed where the head is
        rows = torch.cat([edges[..., :1, :], weights.double(), edges[..., 1:, :], edges[..., 1:, :]], dim=-2)
        flat = rows.reshape(1, -1, *rows.shape[-2:])
        stages = torch.ones(*flat.shape[:-1], 1, dtype=torch.float64)
        return surrogate(RelaxedPlans(flat, stages), self.table).iteration_time.reshape(weights.shape[:-2])

    @property
    def degrees(self) -> tuple[int, ...]:
        """Tensor-parallel degrees, in the candidates' order."""
        return tuple(dict.fromkeys(c.tp for c in self.choices.candidates))

    def plan_seconds(self, plans: Sequence[Sequence[Candidate]]) -> Tensor:
        """Seconds per step of hard plans with the best degrees around their blocks, shape `(plans,)`."""
        index = torch.tensor([[self.choices.candidates.index(c) for c in plan] for plan in plans])
        weights = torch.nn.functional.one_hot(index, len(self.choices.candidates)).double()
        edges = torch.eye(len(self.degrees), dtype=torch.float64)
        times = [
            self.seconds(weights, torch.stack([a, b]).expand(len(plans), 2, -1)) for a in edges for b in edges
        ]
        return torch.stack(times).amin(0)

    def _lossless(self, tp: int) -> int:
        return next(i for i, c in enumerate(self.choices.candidates) if c.tp == tp and c.lossless)


def toy_problem(shape: TransformerShape, network: str, num_devices: int, global_batch_size: int) -> Problem:
    """The Transformer on an invented cluster of one node, sized so that it keeps the devices busy.

    Communication does not overlap with computation (`overlap_exponent` 1), so that its seconds add.
    """
    require_member("network", network, tuple(NETWORKS))
    model = ModelConfig(
        name="bytes", num_layers=shape.num_blocks, hidden_size=shape.width, num_heads=shape.num_heads,
        vocab_size=shape.vocab_size, tie_embeddings=False, max_seq_len=shape.context, dropout=False,
        linear_bias=False,
    )  # fmt: skip
    device = DeviceConfig(
        memory_GiB=1.0, peak_TFLOPs={"bf16": 0.5}, memory_bandwidth_GBps=50.0, gemm_half_size=8.0,
        layer_overhead_us=5.0, overlap_exponent=1.0, reserved_GiB=0.1,
    )  # fmt: skip
    link = LinkConfig(bandwidth_GBps=NETWORKS[network], latency_us=LATENCY_US)
    cluster = ClusterConfig(
        name=network, nodes=[NodeGroupConfig(count=1, gpus=num_devices, device="small", intra_node=link)],
        inter_node=link, devices={"small": device},
    )  # fmt: skip
    training = TrainingConfig(global_batch_size=global_batch_size, seq_len=shape.context)
    return Problem.from_config(Config(
        model=model, cluster=cluster, training=training,
        space=SpaceConfig(), search=SearchConfig(), cost=CostConfig(),
    ))  # fmt: skip


def build_time_model(problem: Problem, choices: CandidateSet) -> TimeModel:
    """Cost table of the candidates, one micro-batch, no pipeline.

    The tensor-parallel bits shorten only the forward all-reduces: the loop rounds partial sums in
    the forward pass and leaves those of backward exact.
    """
    strategies = tuple(
        LayerStrategy(c.tp, c.dp, tp_comm_bits=c.tp_comm_bits, grad_comm_bits=c.grad_comm_bits)
        for c in choices.candidates
    )
    return TimeModel(build_table(problem, OuterSpace(1, (1,), strategies)), choices)
