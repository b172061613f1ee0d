"""The search on a graph while its weights train: placements of operators, and the bits of their sums.

Exact placements do not change the loss; few bits do, and what they cost in steps decides with their seconds
which operators of the toy Transformer's block are split. Every step moves the probabilities of all choices
down the gradient of seconds * (1 + log slowdown of the bits), and then the weights, by one step of a plan
drawn from them. The slowdown is measured by trainings from the initial weights with one sum rounded (`loop`).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import exp
from statistics import mean
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_aggregate

from darts_parallel.bilevel._quantize import straight_through_sum
from darts_parallel.bilevel._trainer import WeightTrainer
from darts_parallel.bilevel.data import load_corpus
from darts_parallel.bilevel.settings import BilevelSettings
from darts_parallel.bilevel.trials import NEXT_SEED, log_slowdown
from darts_parallel.config import LOSSLESS, load_config, run_folder
from darts_parallel.cost import Tensors
from darts_parallel.errors import Amounts, Entries
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
from darts_parallel.report import SearchCurves
from darts_parallel.report import Weights as Odds
from darts_parallel.run import Block, build_layer

INNER = 25
"""Steps of the probabilities for each step of the weights."""
BALANCE = 10.0
"""Step size of the multipliers over the step size of the probabilities."""
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


def captured(settings: BilevelSettings) -> ModuleGraph:
    """Capture a block of the Transformer."""
    model = settings.model
    block = build_layer(model, True, "layers.0", model.vocab_size, seed=0)
    state = torch.zeros(settings.global_batch_size, settings.context, model.hidden_size)
    return capture_module(block, [state])


@dataclass(frozen=True)
class RoundedBlock:
    """A captured block whose ranks send some sums at few bits."""

    graph: ModuleGraph
    ranks: int
    sums: Sums
    block_size: int
    """Numbers that share a scale."""

    def __call__(self, block: Block, state: Tensor) -> Tensor:
        """Run a block with its own weights operator by operator."""
        weights = dict(block.named_parameters())
        known: Tensors = {}
        for op in self.graph.operators:
            given = [known[name] for name in op.inputs]
            if op.op == "output":
                break
            made: Any = given[0] if given else state
            if op.op == "parameter":
                made = weights[op.target]
            elif op.node is not None and op.name in self.sums:
                # every rank's part of the inputs, and a sum at few bits
                bits, dims = self.sums[op.name]
                partials = []
                for rank in range(self.ranks):
                    own = []
                    for tensor, dim in zip(given, dims, strict=True):
                        own.append(tensor if dim is None else tensor.chunk(self.ranks, dim)[rank])
                    partials.append(_call(op.node, own))
                made = straight_through_sum(torch.stack(partials), bits, self.block_size)
            elif op.node is not None:
                made = _call(op.node, given)
            if isinstance(made, (tuple, list)):  # names of parts end with their number
                known |= {name: made[int(name.rpartition(".")[2])] for name in op.outputs}
            else:
                known |= dict.fromkeys(op.outputs, made)
        return given[0]


def _call(node: Node, given: Sequence[Tensor]) -> Any:
    tensors = iter(given)

    def filled(value: Any) -> Any:
        return next(tensors) if isinstance(value, Node) else value

    args, named = map_aggregate((node.args, node.kwargs), filled)
    return node.target(*args, **named)  # type: ignore[operator]


def learn(
    trainer: WeightTrainer,
    text: Tensor,
    run: RoundedBlock,
) -> float:
    """Make one step of the weights with all blocks run alike; return the loss before it, nats."""
    count = trainer.settings.num_blocks
    loss = partial(trainer.toy.loss, runs=[run] * count)
    exact = [(((1, LOSSLESS),), torch.ones(1))] * count
    return trainer.learn(trainer.next_batch(text), loss, exact).loss


class OperatorSearch:
    """Probabilities of a block's choices, and the weights that train with them."""

    def __init__(
        self,
        settings: BilevelSettings,
        mesh: DeviceMeshSpec,
        bits: Sequence[int],
        text: Tensor,
    ) -> None:
        self.settings = settings
        self.text = text
        self.ranks = mesh.ranks[-1]
        self.graph = captured(settings)
        self.exact = plan_graph(self.graph, mesh).plan
        self.space = plan_graph(self.graph, mesh, bits=tuple(bits)).plan.space
        self.programme = GraphProgramme(self.space)
        self.place = self._places()
        tried = sorted({one for few in bits for one in self._worth(few)})
        for one in self.place:
            self.programme.upper[self.place[one][0]] = float(one in tried)
        seeds = [settings.seed + NEXT_SEED * k for k in range(settings.trial_seeds)]
        prices = self.slowdown([[one] for one in tried], settings.trial_steps, seeds)
        self.price = dict(zip(tried, prices, strict=True))
        self.plain = np.array(self.programme.cost)
        self.records: list[Amounts] = []

    def _places(self) -> dict[Sum, tuple[int, Dims]]:
        """Return the variable of every sum of few bits, and what its inputs split."""
        places = {}
        for first, group in zip(self.programme.first, self.space.groups, strict=True):
            for offset, choice in enumerate(group.choices):
                bits = _bits(choice.labels)
                if not bits:
                    continue
                dims = [one[-1].partition("S")[2] for one in choice.inputs]
                split = tuple(int(dim) if dim else None for dim in dims)
                places[group.operators[0].name, bits] = first + offset, split
        return places

    def _worth(self, bits: int) -> list[Sum]:
        """Return the sums that the best plan would use if that number of bits cost no steps."""
        for (_, own), (variable, _) in self.place.items():
            self.programme.upper[variable] = float(own == bits)
        return self.sums_of(self.programme.solve().assignment)

    def sums_of(self, assignment: Sequence[int]) -> list[Sum]:
        """Return the sums of a plan that few bits carry."""
        choose = GraphPlan(self.space, tuple(assignment)).choice
        sums = [(op.name, _bits(choose(op).labels)) for op in self.space.graph.computing]
        return [(name, bits) for name, bits in sums if bits]

    def rounded(self, sums: Sequence[Sum]) -> RoundedBlock:
        """Return the block that sends these sums at few bits."""
        known = {name: (bits, self.place[name, bits][1]) for name, bits in sums}
        return RoundedBlock(self.graph, self.ranks, known, self.settings.block_size)

    def slowdown(
        self,
        plans: Sequence[Sequence[Sum]],
        steps: int,
        seeds: Sequence[int],
    ) -> list[float]:
        """Measure the log slowdown of plans against exact sums, by trainings from the initial weights."""
        if not any(plans):
            return [0.0] * len(plans)
        curves = []
        for sums in [[], *plans]:
            run = self.rounded(sums)
            losses = []
            for seed in seeds:
                trainer = WeightTrainer(self.settings, seed, measure_noise=False)
                losses.append([learn(trainer, self.text, run) for _ in range(steps)])
            curves.append(losses)
        return [log_slowdown(own, curves[0]) for own in curves[1:]]

    def _priced(self, seconds: float) -> np.ndarray:
        """Price the bits for a step of so many seconds; return the costs of all variables."""
        for one, price in self.price.items():
            variable = self.place[one][0]
            self.programme.cost[variable] = float(self.plain[variable]) + seconds * price
        return self.programme.tied_costs()

    def run(self, curves: SearchCurves | None = None) -> None:
        """Move the probabilities and the weights together, and write the curves of every step."""
        settings = self.settings
        rng = np.random.default_rng(settings.seed)
        seconds = self.exact.seconds
        descent = PairDescent(self.programme, BALANCE, rng)
        trainer = WeightTrainer(settings, settings.seed, measure_noise=False)
        for step in range(settings.num_steps):
            costs = self._priced(seconds)
            for _ in range(INNER):
                descent.step(costs)
            seconds = float(self.plain @ descent.now)
            odds = descent.probabilities()
            drawn = [int(rng.choice(len(own), p=own)) for own in odds]
            loss = learn(trainer, self.text, self.rounded(self.sums_of(drawn)))
            self.raw = self.programme.rounded(descent.now)
            record = {"train/loss": loss, "search/expected_s": seconds}
            entropies = [float(-(own * np.log(own)).sum()) for own in odds]
            record["search/entropy"] = mean(entropies)
            record["search/rounded_s"] = self.space.total_seconds(self.raw)
            self.records.append(record)
            if curves is not None:
                curves.add(Odds.of_names(step, self._weights(odds)), record)

    def _weights(self, odds: Sequence[np.ndarray]) -> dict[tuple[str, str], float]:
        """Return the probabilities of all choices by operator and name of the split."""
        found: Counter[tuple[str, str]] = Counter()
        for own, group in zip(odds, self.space.groups, strict=True):
            name = group.operators[0].name
            for choice, probability in zip(group.choices, own.tolist(), strict=True):
                found[name, choice.labels[-1]] += probability
        return dict(found)

    def improved(self) -> tuple[int, ...]:
        """Return the plan that the programme chooses at the seconds of its own step, or the exact one."""
        seconds = self.exact.seconds
        plan: tuple[int, ...] = ()
        for _ in range(10):
            self._priced(seconds)
            found = self.programme.solve().assignment
            if found == plan:
                break
            plan = found
            seconds = self.space.total_seconds(found)
        return plan

    def entry(self, assignment: Sequence[int]) -> Entries:
        """Describe a plan; its time to the same loss is over that of 16 bits."""
        sums = self.sums_of(assignment)
        choose = GraphPlan(self.space, tuple(assignment)).choice
        seconds = self.space.total_seconds(assignment)
        slower = sum(self.price[one] for one in sums)
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
    settings = BilevelSettings.of(problem)
    bits = problem.config.space.pinned("tp_comm_bits") or (LOSSLESS,)
    mesh = make_mesh(problem.cluster, (settings.model.num_heads,))
    search = OperatorSearch(settings, mesh, bits, load_corpus().train)
    curves = SearchCurves(folder / "tensorboard")
    search.run(curves)
    curves.finish()
    curves.writer.close()
    plans = {"raw": search.entry(search.raw), "improved": search.entry(search.improved())}
    seeds = [settings.seed + RETRAINED + k for k in range(settings.trial_seeds)]
    sums = plans["improved"]["sums"]
    slowdown = search.slowdown([sums], settings.retrain_steps, seeds)[0]
    ratio = plans["improved"]["seconds"] * exp(slowdown) / search.exact.seconds
    measured = {"log_slowdown": slowdown, "time_ratio": ratio}
    found = {**plans, "measured": measured, "exact_s": search.exact.seconds}
    write_json(folder / "training.json", {**found, "steps": search.records})
    lines = _report(search, plans)
    lines.append(
        f"measured: {settings.retrain_steps} steps from scratch with other seeds: "
        f"{100 * (exp(slowdown) - 1):.1f} % more steps, {ratio:.3f} times the seconds of 16 bits"
    )
    return [*lines, f"files: {folder}"]


def _report(search: OperatorSearch, plans: Mapping[str, Entries]) -> list[str]:
    """Say what was tried, and what the plans cost."""
    losses = [record["train/loss"] for record in search.records]
    change = f"{losses[0]:.2f} to {losses[-1]:.2f} nats"
    lines = [f"{len(losses)} steps of weights and probabilities: {change}"]
    for (name, bits), price in search.price.items():
        lines.append(f"tried: {name} at {bits} bits: {100 * (exp(price) - 1):.1f} % more steps")
    lines.append(f"16 bits: {1e3 * search.exact.seconds:.4f} ms a block and step")
    for name, plan in plans.items():
        few = f"sums of few bits: {plan['sums'] or 'none'}"
        ratio = f"{plan['time_ratio']:.3f} times the predicted seconds to a loss"
        lines.append(f"{name}: {1e3 * plan['seconds']:.4f} ms, {few}, {ratio}")
    return lines
