"""The space of the bilevel loop: the main search's with the bits of every block, and their price in steps."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from darts_parallel.bilevel._quantize import Pair
from darts_parallel.bilevel.settings import refuse_unsearched
from darts_parallel.cost import (
    LOSSLESS,
    CostTable,
    HardPlans,
    build_tables,
    canonical,
    without_dominated,
)
from darts_parallel.exact import outer_lower_bounds
from darts_parallel.gradient import explain_infeasible
from darts_parallel.plans import LayerStrategy, Plan
from darts_parallel.problem import Problem


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

    def label(self) -> str:
        """Write it in short for tables, e.g. `tp4 dp2 b4 g2`."""
        return f"tp{self.tp} dp{self.dp} b{self.forward_pair[1]} g{self.gradient_pair[1]}"

    def training_key(self) -> str:
        """Name the part that affects the loss: plans of equal names train equally."""
        sums = "exact sums"
        if self.forward_pair[1] < LOSSLESS:
            sums = f"tp{self.tp} b{self.tp_comm_bits}"
        sent = "exact gradients"
        if self.gradient_pair[1] < LOSSLESS:
            sent = f"dp{self.dp} g{self.grad_comm_bits}"
        return f"{sums}, {sent}"


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
        by_batch: Log slowdown by every global batch size, `log(1 + B_noise / B)`.
    """

    forward_pairs: tuple[Pair, ...]
    gradient_pairs: tuple[Pair, ...]
    forward: Tensor
    gradient: Tensor
    by_batch: dict[int, float]

    @staticmethod
    def zero(
        forward: Sequence[Pair],
        gradient: Sequence[Pair],
        blocks: int,
        batches: Sequence[int],
    ) -> "LogSlowdown":
        """Begin with prices of 0."""
        sums = torch.zeros(blocks, len(forward), dtype=torch.float64)
        sent = torch.zeros(blocks, len(gradient), dtype=torch.float64)
        return LogSlowdown(tuple(forward), tuple(gradient), sums, sent, dict.fromkeys(batches, 0.0))

    def of_plan(self, blocks: Sequence[Candidate], batch: int) -> float:
        """Price a hard plan: one candidate for each block, and a global batch size."""
        sums = [self.forward_pairs.index(block.forward_pair) for block in blocks]
        sent = [self.gradient_pairs.index(block.gradient_pair) for block in blocks]
        rows = range(len(blocks))
        by_blocks = self.forward[rows, sums].sum() + self.gradient[rows, sent].sum()
        return float(by_blocks) + self.by_batch[batch]

    def nonnegative(self) -> tuple["LogSlowdown", float]:
        """Put each block's cheapest pair at 0; also return what was taken from every plan alike."""
        sums = self.forward.amin(1, keepdim=True)
        sent = self.gradient.amin(1, keepdim=True)
        shifted = replace(self, forward=self.forward - sums, gradient=self.gradient - sent)
        return shifted, float(sums.sum() + sent.sum())

    def on_choices(
        self,
        choices: Sequence[LayerStrategy],
        layers: int,
        first_block: int,
    ) -> Tensor:
        """Price every layer under every strategy of a table, shape `(layers, C)`.

        Args:
            choices: C strategies.
            layers: Number of layers of the table; those around the blocks travel at 16 bits and cost nothing.
        """
        candidates = [Candidate.of(choice) for choice in choices]
        sums = torch.tensor([self.forward_pairs.index(c.forward_pair) for c in candidates])
        sent = torch.tensor([self.gradient_pairs.index(c.gradient_pair) for c in candidates])
        result = torch.zeros(layers, len(candidates), dtype=torch.float64)
        end = first_block + len(self.forward)
        result[first_block:end] = self.forward[:, sums] + self.gradient[:, sent]
        return result


FIRST_BLOCK = 1
"""Layer of the first block; the embedding comes before it."""
Bits = tuple[int, int]
"""Bits of a layer's tensor-parallel sums and of its gradients."""
EXACT_BITS = (LOSSLESS, LOSSLESS)


def at_batch(problem: Problem, global_batch_size: int) -> Problem:
    """Set another global batch size."""
    training = replace(problem.training, global_batch_size=global_batch_size)
    return Problem.from_config(replace(problem.config, training=training))


def exchange_choices(
    table: CostTable,
    choices: Sequence[LayerStrategy],
    source: Tensor,
) -> CostTable:
    """Give every strategy in every layer the cost that another strategy of the old table has there.

    Args:
        table: Costs of C strategies.
        choices: The D new strategies; each has the layout and the legality of its sources.
        source: Old strategy of every layer and new strategy, shape `(L, D)`.
    """
    layers = torch.arange(table.num_layers).unsqueeze(1)
    first = source[0]

    def exchanged(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: exchanged(part) for name, part in value.items()}
        return None if value is None else value[..., layers, source]

    changed: dict[str, Any] = {"choices": tuple(choices), "layout": table.layout[first]}
    changed["allowed"] = table.allowed[:, first]
    if table.kind_allowed is not None:
        changed["kind_allowed"] = table.kind_allowed[:, first]
    for item in fields(table):
        if item.metadata.get("axes", "").endswith("LC"):
            changed[item.name] = exchanged(getattr(table, item.name))
    return replace(table, **changed)


def at_bits(strategy: LayerStrategy, bits: Bits) -> LayerStrategy:
    """Set other bits; groups of one rank send nothing and stay at 16."""
    sums = bits[0] if strategy.tp > 1 else LOSSLESS
    sent = bits[1] if strategy.dp > 1 else LOSSLESS
    return replace(strategy, tp_comm_bits=sums, grad_comm_bits=sent)


def with_fixed_bits(table: CostTable, bits: Sequence[Bits]) -> CostTable:
    """Keep the strategies without their bits, every layer priced at the bits given for it.

    Args:
        table: With every strategy at all bits that `bits` names.
    """
    choices = tuple(dict.fromkeys(at_bits(choice, EXACT_BITS) for choice in table.choices))
    index = {choice: c for c, choice in enumerate(table.choices)}
    source = [[index[at_bits(choice, own)] for choice in choices] for own in bits]
    return exchange_choices(table, choices, torch.tensor(source))


@dataclass(frozen=True)
class JointSpace:
    """All plans that the loop chooses from, priced.

    Attributes:
        problem: Model, cluster, job and space.
        batches: Global batch sizes.
        whole: Tables of every batch size and pipeline degree with all strategies.
        batch_of: Global batch size of every table.
        tables: The same tables for the search: layers around the blocks cost what they cost at 16 bits,
            and of strategies that training cannot tell apart only those are left that no other dominates.
    """

    problem: Problem
    batches: tuple[int, ...]
    whole: tuple[CostTable, ...]
    batch_of: tuple[int, ...]
    tables: tuple[CostTable, ...]

    @staticmethod
    def build(problem: Problem, batches: Sequence[int]) -> "JointSpace":
        """Price the space.

        Errors:
            ConfigError: a setting asks for what the loop does not search, or no plan is legal.
            InfeasibleError: no plan fits the memory.
        """
        refuse_unsearched(problem)
        whole: list[CostTable] = []
        batch_of: list[int] = []
        for batch in batches:
            own = build_tables(at_batch(problem, batch))
            whole += own
            batch_of += [batch] * len(own)
        blocks = problem.model.config.num_layers
        tables = [_without_dominated(_exact_edges(table, blocks)) for table in whole]
        # refused before anything trains; what these bounds let pass is refused by the exact optimum
        if not any(bool(outer_lower_bounds(table).isfinite().any()) for table in tables):
            raise explain_infeasible(problem, whole)
        return JointSpace(problem, tuple(batches), tuple(whole), tuple(batch_of), tuple(tables))

    @property
    def num_blocks(self) -> int:
        """Blocks of the Transformer."""
        return self.problem.model.config.num_layers

    @property
    def num_layers(self) -> int:
        """Layers of the tables: the blocks and those around them."""
        return self.tables[0].num_layers

    @cached_property
    def forward_pairs(self) -> tuple[Pair, ...]:
        """Distinct tensor-parallel degrees and bits of sums, exact ones first."""
        return self._pairs(lambda candidate: candidate.forward_pair)

    @cached_property
    def gradient_pairs(self) -> tuple[Pair, ...]:
        """Distinct data-parallel degrees and bits of gradients, exact ones first."""
        return self._pairs(lambda candidate: candidate.gradient_pair)

    def _pairs(self, of: Callable[[Candidate], Pair]) -> tuple[Pair, ...]:
        found = {of(Candidate.of(choice)) for table in self.tables for choice in table.choices}
        return tuple(sorted(found, key=lambda pair: (-pair[1], pair[0])))

    def blocks_of(self, plan: Plan) -> tuple[Candidate, ...]:
        """Keep the part of a plan that affects the loss."""
        layers = plan.layers[FIRST_BLOCK : FIRST_BLOCK + self.num_blocks]
        return tuple(Candidate.of(layer) for layer in layers)

    def to_plan(self, table: int, plans: HardPlans) -> Plan:
        """Read the only plan of `plans`, canonicalized, with the layers around the blocks at 16 bits."""
        return self.canonicalized(plans.to_plan(0, self.tables[table]), table)

    def canonicalized(self, plan: Plan, table: int) -> Plan:
        """Name strategies of a layer that cost exactly the same by one of them.

        Args:
            table: Number of the table that holds it.
        """
        bits = self.bits_of(plan)
        own = with_fixed_bits(self.whole[table], bits)
        outer = own.num_micro_batches.tolist().index(plan.num_micro_batches)
        choices = [own.choices.index(at_bits(layer, EXACT_BITS)) for layer in plan.layers]
        first_layers = torch.tensor([plan.boundaries[:-1]])
        hard = HardPlans(torch.tensor([outer]), torch.tensor([choices]), first_layers)
        return with_bits(canonical(own, hard).to_plan(0, own), bits)

    def bits_of(self, plan: Plan) -> tuple[Bits, ...]:
        """Return the bits of every layer of a plan; layers around the blocks have 16."""
        inside = range(FIRST_BLOCK, FIRST_BLOCK + self.num_blocks)
        own = ((layer.tp_comm_bits, layer.grad_comm_bits) for layer in plan.layers)
        return tuple(bits if index in inside else EXACT_BITS for index, bits in enumerate(own))

    def of_batch(self, batch: int) -> list[int]:
        """Return the numbers of the tables of a global batch size."""
        return [index for index, own in enumerate(self.batch_of) if own == batch]


def with_bits(plan: Plan, bits: Sequence[Bits]) -> Plan:
    """Set the given bits in every layer."""
    layers = tuple(at_bits(layer, own) for layer, own in zip(plan.layers, bits, strict=True))
    return replace(plan, layers=layers)


def _exact_edges(table: CostTable, blocks: int) -> CostTable:
    """Price every layer around the blocks at 16 bits whatever the strategy says."""
    index = {choice: c for c, choice in enumerate(table.choices)}
    exact = [index[at_bits(choice, EXACT_BITS)] for choice in table.choices]
    inside = range(FIRST_BLOCK, FIRST_BLOCK + blocks)
    same = list(index.values())
    source = [same if layer in inside else exact for layer in range(table.num_layers)]
    return exchange_choices(table, table.choices, torch.tensor(source))


def _without_dominated(table: CostTable) -> CostTable:
    """Drop strategies that one of the same degrees and bits beats or equals in everything."""
    groups: dict[Candidate, list[int]] = {}
    for index, choice in enumerate(table.choices):
        groups.setdefault(Candidate.of(choice), []).append(index)
    kept: list[int] = []
    judged = table
    if _always_fits(table):  # then bytes make no strategy better
        bytes_of = ("static", "activation", "working")
        nothing: dict[str, Any] = {
            name: torch.zeros_like(getattr(table, name)) for name in bytes_of
        }
        judged = replace(table, **nothing)
    for members in groups.values():
        left = without_dominated(judged.keep_choices(members)).choices
        kept += [index for index in members if table.choices[index] in left]
    return table.keep_choices(sorted(kept))


def _always_fits(table: CostTable) -> bool:
    """Tell whether the heaviest strategies of all layers fit a single device of the smallest memory."""
    in_flight = table.in_flight.amax(1, keepdim=True)
    kept = table.static.amax(-1) + in_flight * table.activation.amax(-1)
    return bool((kept.sum(1) + table.working.amax((-2, -1)) <= table.capacity.min()).all())
