"""The search on a graph while its weights train: placements of operators, and the bits of their sums.

Exact placements do not change the loss; few bits do, and what they cost in steps decides with their seconds
which operators of the toy Transformer's block are split. Every step moves the probabilities of all choices
down the gradient of seconds * (1 + log slowdown of the bits), and then the weights, by one step of a plan
drawn from them. The slowdown is measured by trainings from the initial weights with one sum rounded (`loop`).
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from itertools import product
from math import exp
from statistics import mean
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.fx.node import map_aggregate

from darts_parallel.bilevel._measurements import log_delay
from darts_parallel.bilevel._quantize import straight_through_sum
from darts_parallel.bilevel._trainer import WeightTrainer
from darts_parallel.bilevel.data import load_corpus
from darts_parallel.bilevel.jobs import Jobs
from darts_parallel.bilevel.loop import NEXT_SEED, behind, middle_of_read
from darts_parallel.bilevel.settings import BilevelSettings, TransformerShape
from darts_parallel.bilevel.transformer import Weights, block, initial_weights, loss_through
from darts_parallel.config import load_config, run_folder
from darts_parallel.cost import LOSSLESS
from darts_parallel.graph import (
    DeviceMeshSpec,
    GraphPlan,
    GraphProgramme,
    ModuleGraph,
    PairDescent,
    capture_module,
    make_mesh,
    plan_graph,
)
from darts_parallel.plans import write_json
from darts_parallel.problem import Problem
from darts_parallel.report import write_scalars

INNER, BALANCE = 25, 10.0
"""Steps of the probabilities for each step of the weights; steps of their multipliers over their own."""
RETRAINED = 5 * NEXT_SEED
"""Between the seed of a search and that of the trainings that judge its plan."""
Sum = tuple[str, int]
"""An operator whose output is summed over the ranks, and the bits that the sum is sent with."""
Dims = tuple[int | None, ...]
"""Dimension of every input of an operator that the ranks split."""
Sums = Mapping[str, tuple[int, Dims]]
"""Bits and dimensions by operator."""
DEFAULTS = ("experiment=bilevel", "model.hidden_size=128")
"""Set a width where sums of few bits change which operators are split."""


class ToyBlock(nn.Module):
    """One block of the toy Transformer, all ranks in one."""

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        drawn = initial_weights(shape, torch.Generator().manual_seed(0))
        own = {
            name[2:]: nn.Parameter(weight)
            for name, weight in drawn.items()
            if name.startswith("0.")
        }
        self.weights = nn.ParameterDict(own)

    def forward(self, state: Tensor) -> Tensor:
        """Run the block on a state `(B, T, H)`."""
        weights = {f"0.{name}": weight for name, weight in self.weights.items()}
        return block(weights, 0, state, 1, lambda partials: partials.sum(0))


@lru_cache(maxsize=4)
def captured(shape: TransformerShape, batch: int) -> ModuleGraph:
    """Capture the block."""
    return capture_module(ToyBlock(shape), [torch.zeros(batch, shape.context, shape.width)])


def run_block(
    graph: ModuleGraph,
    ranks: int,
    sums: Sums,
    block_size: int,
    weights: Weights,
    index: int,
    state: Tensor,
) -> Tensor:
    """Run one block operator by operator, with some sums as so many ranks send them."""
    known: dict[str, Tensor] = {}
    for op in graph.operators:
        given = [known[name] for name in op.inputs]
        made: Any = given[0] if given else state
        if op.op == "parameter":
            made = weights[f"{index}.{op.target.removeprefix('weights.')}"]
        elif op.op == "output":
            return given[0]
        elif op.node is not None and op.name in sums:
            bits, dims = sums[op.name]
            parts = (
                [
                    t if d is None else t.chunk(ranks, d)[rank]
                    for t, d in zip(given, dims, strict=True)
                ]
                for rank in range(ranks)
            )
            made = straight_through_sum(
                torch.stack([_call(op.node, own) for own in parts]), bits, block_size
            )
        elif op.node is not None:
            made = _call(op.node, given)
        for name in op.outputs:
            known[name] = (
                made[int(name.rpartition(".")[2])] if isinstance(made, (tuple, list)) else made
            )
    raise AssertionError


def _call(node: Node, given: Sequence[Tensor]) -> Any:
    tensors = iter(given)
    args, named = map_aggregate(
        (node.args, node.kwargs), lambda value: next(tensors) if isinstance(value, Node) else value
    )
    return node.target(*args, **named)  # type: ignore[operator]


def learn(trainer: WeightTrainer, text: Tensor, ranks: int, sums: Sums) -> float:
    """Make one step of the weights with some sums rounded; return the loss before it, nats."""
    own = trainer.settings
    run = partial(
        run_block, captured(own.shape, own.global_batch_size), ranks, sums, own.block_size
    )
    loss = partial(loss_through, blocks=[run] * own.num_blocks)
    exact = [(((1, LOSSLESS),), torch.ones(1))] * own.num_blocks
    return trainer.learn(trainer.next_batch(text), loss, exact).loss


def train_sums(
    settings: BilevelSettings, text: Tensor, ranks: int, sums: Sums, steps: int, seed: int
) -> list[float]:
    """Train from the initial weights with some sums rounded; return the losses of all steps, nats."""
    trainer = WeightTrainer(settings, settings.global_batch_size, seed, measure_noise=False)
    return [learn(trainer, text, ranks, sums) for _ in range(steps)]


class OperatorSearch:
    """Probabilities of a block's choices, and the weights that train with them."""

    def __init__(
        self,
        settings: BilevelSettings,
        mesh: DeviceMeshSpec,
        bits: Sequence[int],
        text: Tensor,
        jobs: Jobs,
    ) -> None:
        self.settings, self.text, self.jobs = settings, text, jobs
        self.ranks = mesh.ranks[-1]
        graph = captured(settings.shape, settings.global_batch_size)
        self.exact = plan_graph(graph, mesh).plan
        self.space = plan_graph(graph, mesh, bits=tuple(bits)).plan.space
        self.programme = GraphProgramme(self.space)
        self.place: dict[Sum, tuple[int, Dims]] = {}
        """Variable of every sum of few bits, and what its inputs split."""
        for first, group in zip(self.programme.first, self.space.groups, strict=True):
            for k, choice in enumerate(group.choices):
                if few := _bits(choice.labels):
                    dims = (one[-1].partition("S")[2] for one in choice.inputs)
                    told = tuple(int(d) if d else None for d in dims)
                    self.place[group.operators[0].name, few] = first + k, told
        tried = sorted({one for few in bits for one in self._worth(few)})
        for one in self.place:
            self.programme.upper[self.place[one][0]] = float(one in tried)
        seeds = [settings.seed + NEXT_SEED * k for k in range(settings.trial_seeds)]
        prices = self.slowdown([[one] for one in tried], settings.trial_steps, seeds)
        self.price = dict(zip(tried, prices, strict=True))
        self.plain = np.array(self.programme.cost)
        self.records: list[dict[str, float]] = []

    def _worth(self, bits: int) -> list[Sum]:
        """Return the sums that the best plan would use if that number of bits cost no steps."""
        for (_, own), (variable, _) in self.place.items():
            self.programme.upper[variable] = float(own == bits)
        return self.sums_of(self.programme.solve().assignment)

    def sums_of(self, assignment: Sequence[int]) -> list[Sum]:
        """Return the sums of a plan that few bits carry."""
        choose, operators = (
            GraphPlan(self.space, tuple(assignment)).choice,
            self.space.graph.computing,
        )
        return [(op.name, bits) for op in operators if (bits := _bits(choose(op).labels))]

    def rounded(self, sums: Sequence[Sum]) -> Sums:
        """Return sums as `run_block` takes them."""
        return {name: (bits, self.place[name, bits][1]) for name, bits in sums}

    def slowdown(
        self, plans: Sequence[Sequence[Sum]], steps: int, seeds: Sequence[int]
    ) -> list[float]:
        """Measure the log slowdown of plans against exact sums, by trainings from the initial weights."""
        if not any(plans):
            return [0.0] * len(plans)
        told = [
            (self.settings, self.text, self.ranks, self.rounded(sums), steps, seed)
            for sums, seed in product([[], *plans], seeds)
        ]
        curves = self.jobs.map(train_sums, told)
        exact, *others = ([next(curves) for _ in seeds] for _ in [None, *plans])
        together, middle = [mean(step) for step in zip(*exact, strict=True)], middle_of_read(steps)
        return [log_delay(together, mean(map(behind, own, exact)), middle) for own in others]

    def _priced(self, seconds: float) -> np.ndarray:
        """Price the bits for a step of so many seconds; return the costs of all variables."""
        for one, price in self.price.items():
            variable = self.place[one][0]
            self.programme.cost[variable] = float(self.plain[variable]) + seconds * price
        return self.programme.tied_costs()

    def run(self) -> None:
        """Move the probabilities and the weights together."""
        rng, seconds = np.random.default_rng(self.settings.seed), self.exact.seconds
        descent = PairDescent(self.programme, BALANCE, rng)
        settings, text = self.settings, self.text
        trainer = WeightTrainer(
            settings, settings.global_batch_size, settings.seed, measure_noise=False
        )
        for _ in range(settings.num_steps):
            costs = self._priced(seconds)
            for _ in range(INNER):
                descent.step(costs)
            seconds, odds = float(self.plain @ descent.now), descent.probabilities()
            drawn = [int(rng.choice(len(own), p=own)) for own in odds]
            loss = learn(trainer, text, self.ranks, self.rounded(self.sums_of(drawn)))
            self.raw = self.programme.rounded(descent.now)
            record = {
                "train/loss": loss,
                "search/expected_s": seconds,
                "search/entropy": mean(float(-(own * np.log(own)).sum()) for own in odds),
                "search/rounded_s": self.space.total_seconds(self.raw),
            }
            for own, group in zip(odds, self.space.groups, strict=True):
                name = group.operators[0].name
                if any(name == tried for tried, _ in self.price):
                    labels = (choice.labels[-1] for choice in group.choices)
                    record |= {
                        f"{name}/{label}": float(p) for label, p in zip(labels, own, strict=True)
                    }
            self.records.append(record)

    def improved(self) -> tuple[int, ...]:
        """Return the plan that the programme chooses at the seconds of its own step, or the exact one."""
        seconds, plan = self.exact.seconds, tuple[int, ...]()
        for _ in range(10):
            self._priced(seconds)
            found = self.programme.solve().assignment
            if found == plan:
                break
            plan, seconds = found, self.space.total_seconds(found)
        return plan

    def entry(self, assignment: Sequence[int]) -> dict[str, Any]:
        """Describe a plan; its time to the same loss is over that of 16 bits."""
        sums, choose = self.sums_of(assignment), GraphPlan(self.space, tuple(assignment)).choice
        seconds, slower = self.space.total_seconds(assignment), sum(self.price[one] for one in sums)
        ratio = seconds * exp(slower) / self.exact.seconds
        splits = {op.name: choose(op).labels[-1] for op in self.space.graph.computing}
        return {"seconds": seconds, "sums": sums, "time_ratio": ratio, "split": splits}


def _bits(labels: Sequence[str]) -> int:
    """Return the bits of a choice's sum; 0 where it sends none, or exact ones."""
    return int(labels[-1].partition("@")[2] or 0)


def train_operators(arguments: Sequence[str]) -> list[str]:
    """Run the search by overrides of `experiment=bilevel`, judge its plan by trainings, write and report."""
    folder = run_folder(arguments)
    job = [one for one in arguments if not one.startswith(("train=", "hydra."))]
    problem = Problem.from_config(load_config([*DEFAULTS, *job]))
    settings = BilevelSettings.of(
        problem, problem.config.bilevel.seeds[0] if problem.config.bilevel else 0
    )
    bits = problem.config.space.pinned("tp_comm_bits") or (LOSSLESS,)
    with Jobs(settings.processes) as jobs:
        mesh = make_mesh(problem.cluster, (settings.shape.num_heads,))
        search = OperatorSearch(settings, mesh, bits, load_corpus().train, jobs)
        search.run()
        plans = {"raw": search.entry(search.raw), "improved": search.entry(search.improved())}
        seeds = [settings.seed + RETRAINED + k for k in range(settings.trial_seeds)]
        sums, steps = plans["improved"]["sums"], settings.retrain_steps
        measured = search.slowdown([sums], steps, seeds)[0]
    ratio = plans["improved"]["seconds"] * exp(measured) / search.exact.seconds
    write_scalars(folder / "tensorboard", search.records)
    found = {
        "measured": {"log_slowdown": measured, "time_ratio": ratio},
        "exact_s": search.exact.seconds,
    }
    write_json(folder / "training.json", {**plans, **found, "steps": search.records})
    losses = [record["train/loss"] for record in search.records]
    return [
        f"{len(losses)} steps of weights and probabilities: {losses[0]:.2f} to {losses[-1]:.2f} nats",
        *(
            f"tried: {name} at {bits} bits: {100 * (exp(price) - 1):.1f} % more steps"
            for (name, bits), price in search.price.items()
        ),
        f"16 bits: {1e3 * search.exact.seconds:.4f} ms a block and step",
        *(
            f"{name}: {1e3 * one['seconds']:.4f} ms, sums of few bits: {one['sums'] or 'none'}, "
            f"{one['time_ratio']:.3f} times the predicted seconds to a loss"
            for name, one in plans.items()
        ),
        f"measured: {steps} steps from scratch with other seeds: {100 * (exp(measured) - 1):.1f} % more "
        f"steps, {ratio:.3f} times the seconds of 16 bits",
        f"files: {folder}",
    ]
