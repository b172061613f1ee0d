"""The space of the bilevel loop: the main search's at several global batch sizes, with prices in steps."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import log
from operator import attrgetter

import torch
from torch import Tensor

from darts_parallel.bilevel._quantize import Pair
from darts_parallel.bilevel.settings import refuse_unsearched
from darts_parallel.config import LOSSLESS
from darts_parallel.cost import (
    CostTable,
    HardPlans,
    build_tables,
    canonical,
    evaluate_batch,
    filled,
    float_tensor,
    without_dominated,
)
from darts_parallel.gradient import NoPlanFitsError, proven_infeasible
from darts_parallel.plans import LayerStrategy, Plan
from darts_parallel.problem import Problem

FIRST_BLOCK = 1
"""Layer of the first block; the embedding comes before it."""
EDGE_PRICE = 1.0
"""Log slowdown of few bits in the layers around the blocks, which the toy trains at 16 bits alone."""
BANNED = 1e3
"""Log slowdown of bits that a plan may not have."""


@dataclass(frozen=True, order=True)
class Candidate:
    """One block's strategy without ZeRO, recomputation and stages, which change no loss."""

    tp: int
    dp: int
    tp_comm_bits: int = LOSSLESS
    grad_comm_bits: int = LOSSLESS

    @staticmethod
    def of(strategy: LayerStrategy) -> "Candidate":
        """Keep what affects the loss."""
        return Candidate(strategy.tp, strategy.dp, strategy.tp_comm_bits, strategy.grad_comm_bits)

    @property
    def forward_pair(self) -> Pair:
        """Tensor-parallel degree and bits of the sums; a group of one rank sends nothing."""
        return self.tp, self.tp_comm_bits if self.tp > 1 else LOSSLESS

    @property
    def gradient_pair(self) -> Pair:
        """Data-parallel degree and bits of the gradients."""
        return self.dp, self.grad_comm_bits if self.dp > 1 else LOSSLESS

    @property
    def lossless(self) -> bool:
        """Whether training computes what exact parallelism would."""
        return self.forward_pair[1] >= LOSSLESS and self.gradient_pair[1] >= LOSSLESS


EXACT = Candidate(1, 1)
"""A block that trains as every plan without lossy collectives does, whatever its degrees."""


@dataclass(frozen=True)
class LogSlowdown:
    """An additive estimate of `log(steps to target)`, up to a constant that all plans share.

    Attributes:
        forward_pairs: Tensor-parallel degrees with the bits of their sums, Kf of them.
        gradient_pairs: Data-parallel degrees with the bits of their gradients, Kg of them.
        forward: Log slowdown by every block's sums, shape `(blocks, Kf)`, float64.
        gradient: Log slowdown by every block's gradients, shape `(blocks, Kg)`, float64.
        by_batch: Log slowdown by every global batch size.
    """

    forward_pairs: tuple[Pair, ...]
    gradient_pairs: tuple[Pair, ...]
    forward: Tensor
    gradient: Tensor
    by_batch: dict[int, float]

    @property
    def all_bits(self) -> set[int]:
        """Return all bits that sums or gradients may have."""
        return {bits for _, bits in (*self.forward_pairs, *self.gradient_pairs)}

    def of_pairs(
        self,
        forward: Sequence[float],
        gradient: Sequence[float],
    ) -> "LogSlowdown":
        """Price pairs alike in all blocks; arguments have the lengths Kf and Kg."""
        sums = float_tensor([list(forward)] * len(self.forward))
        sent = float_tensor([list(gradient)] * len(self.gradient))
        return replace(self, forward=sums, gradient=sent)

    def at_bits(
        self,
        sums: int,
        sent: int,
    ) -> "LogSlowdown":
        """Ban all bits but the given ones in all blocks."""
        banned = []
        for pairs, own in ((self.forward_pairs, sums), (self.gradient_pairs, sent)):
            banned.append([0.0 if bits in (own, LOSSLESS) else BANNED for _, bits in pairs])
        return self.of_pairs(*banned)

    def of_plan(
        self,
        blocks: Sequence[Candidate],
        batch: int,
    ) -> float:
        """Price a hard plan: one candidate for each block, and a global batch size."""
        return float(self._on_blocks(blocks).trace()) + self.by_batch[batch]

    def _on_blocks(self, candidates: Sequence[Candidate]) -> Tensor:
        """Price every block under each of C candidates, shape `(blocks, C)`."""
        sums = [self.forward_pairs.index(candidate.forward_pair) for candidate in candidates]
        sent = [self.gradient_pairs.index(candidate.gradient_pair) for candidate in candidates]
        return self.forward[:, sums] + self.gradient[:, sent]

    def on_choices(self, table: CostTable) -> Tensor:
        """Price every layer under every strategy of a table by its bits, shape `(L, C)`."""
        candidates = [Candidate.of(choice) for choice in table.choices]
        edge = [0.0 if candidate.lossless else EDGE_PRICE for candidate in candidates]
        result = float_tensor([edge] * table.num_layers)
        end = FIRST_BLOCK + len(self.forward)
        result[FIRST_BLOCK:end] = self._on_blocks(candidates)
        return result


@dataclass(frozen=True)
class BatchPlan:
    """The best plan of one global batch size, and what it costs."""

    plan: Plan
    blocks: tuple[Candidate, ...]
    """The part of every block that affects the loss."""
    batch: int
    """Global batch size."""
    seconds: float
    """Predicted seconds a step."""
    log_slowdown: float
    """Learned, up to a constant that all plans share."""
    proven: bool = False
    """Whether no plan of the batch size has less seconds plus learned price of a step."""

    def problem(self, problem: Problem) -> Problem:
        """Set the plan's global batch size."""
        return problem.with_training(global_batch_size=self.batch)

    @property
    def value(self) -> float:
        """The upper objective, `log(seconds) + log(steps)`; lower is better."""
        return log(self.seconds) + self.log_slowdown

    def describe(self) -> str:
        """Name degrees, micro-batches and bits."""
        return self.plan.describe(self.batch)


def priced(table: CostTable, prices: LogSlowdown, price: float) -> CostTable:
    """Add the price of steps to `per_iteration`: so many seconds for a log slowdown of 1."""
    steps = price * prices.on_choices(table)
    return replace(table, per_iteration=table.per_iteration + steps)


@dataclass(frozen=True)
class JointSpace:
    """All plans that the loop chooses from, priced in seconds.

    Attributes:
        problem: Model, cluster, job and space.
        tables: Of every global batch size and pipeline degree. Of strategies that training cannot tell
            apart only those are left that no other dominates.
        batches: Global batch size of every table.
    """

    problem: Problem
    tables: tuple[CostTable, ...]
    batches: tuple[int, ...]

    @staticmethod
    def build(problem: Problem, batches: Sequence[int]) -> "JointSpace":
        """Price the space.

        Errors:
            ConfigError: a setting asks for what the loop does not search, or no plan is legal.
            InfeasibleError: no plan fits the memory.
        """
        refuse_unsearched(problem)
        tables = []
        owners = []
        for batch in batches:
            for table in build_tables(problem.with_training(global_batch_size=batch)):
                tables.append(without_dominated(table, Candidate.of))
                owners.append(batch)
        # refused before anything trains; what these bounds let pass is refused by the exact optimum
        if proven_infeasible(tables, "layerwise"):
            raise NoPlanFitsError(problem, tables)
        return JointSpace(problem, tuple(tables), tuple(owners))

    @property
    def num_blocks(self) -> int:
        """Blocks of the Transformer."""
        return self.problem.model.config.num_layers

    @cached_property
    def free(self) -> LogSlowdown:
        """Return prices of 0."""
        sums = self._pairs(attrgetter("forward_pair"))
        sent = self._pairs(attrgetter("gradient_pair"))
        none = filled(0.0, self.num_blocks, 0)
        empty = LogSlowdown(sums, sent, none, none, dict.fromkeys(self.batches, 0.0))
        return empty.of_pairs([0.0] * len(sums), [0.0] * len(sent))

    def _pairs(self, of: Callable[[Candidate], Pair]) -> tuple[Pair, ...]:
        """Return the distinct pairs of all strategies, exact ones first."""
        found = {of(Candidate.of(choice)) for table in self.tables for choice in table.choices}
        return tuple(sorted(found, key=lambda pair: (-pair[1], pair[0])))

    def of_batch(self, batch: int) -> list[int]:
        """Return the numbers of the tables of a global batch size."""
        return [number for number, own in enumerate(self.batches) if own == batch]

    def blocks_of(self, plan: Plan) -> tuple[Candidate, ...]:
        """Keep the part of a plan that affects the loss."""
        layers = plan.layers[FIRST_BLOCK : FIRST_BLOCK + self.num_blocks]
        return tuple(map(Candidate.of, layers))

    def price(
        self,
        table: int,
        plans: HardPlans,
        prices: LogSlowdown,
    ) -> BatchPlan | None:
        """Return the best of B hard plans of a table; None where none fits the memory.

        Strategies of a layer that cost and train the same get one name.
        """
        own = self.tables[table]
        batch = self.batches[table]
        cost = evaluate_batch(own, plans)
        by_layer = prices.on_choices(own)[torch.arange(own.num_layers), plans.choices]
        steps = by_layer.sum(1) + prices.by_batch[batch]
        value = (cost.iteration_time.log() + steps).masked_fill(~cost.feasible, torch.inf)
        index = int(value.argmin())
        if not bool(cost.feasible[index]):
            return None
        seconds = float(cost.iteration_time[index])
        own = priced(own, prices, seconds)
        plan = canonical(own, plans[index : index + 1]).to_plan(0, own)
        return BatchPlan(plan, self.blocks_of(plan), batch, seconds, float(steps[index]))
