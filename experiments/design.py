"""Ways to spend a budget on hardware, next to each other: tangents of all plans, the share rule, and rivals.

    python -m experiments.design                                        # needs the extra rivals
    python -m experiments.design cases=[llama3_405b_4] methods=[tangents,cmaes] seeds=[0] calls=60

Every method has the budget of the reference hardware, may call the same planner (all even uniform plans at one
point) equally often, and begins at the reference. Rivals propose shares of the whole budget, that of memory among
them, and are told how far the lightest plan is from fitting; theirs are always fully spent within the bounds. A gap
is to the bound that the tangents prove. Slope passes are in the seconds, not in the calls.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import exp, inf, log
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from omegaconf import OmegaConf

from darts_parallel.config import config_dir, require_at_least, require_members, run_main
from darts_parallel.design import Design, Designer, Prices, design_of
from darts_parallel.report import markdown_table
from experiments.study import Report, Study, StudyOptions, run_study

Array = NDArray[np.float64]
FOUR = ("device.peak_flops", "device.memory", "device.memory_bandwidth", "inter_node.bandwidth")
SEVEN = (*FOUR, "intra_node.bandwidth", "intra_node.latency", "inter_node.latency")
SHARED = ("inter_node.bandwidth", "inter_node.latency", "device.memory_bandwidth")
"""Figures that all groups have in common on top of their own: a spine of the network, a generation of HBM."""
LLAMA = ("model=llama3_405b", "training=llama3_405b", "cluster=h100_128x8", "space.tp=[4,8,16]",
         "space.pp=[8,16]", "space.recompute=[none,selective,full]", "space.sequence_parallel=true")  # fmt: skip
SMALL = ("model=llama3_70b", "training=llama3_70b", "space.tp=[2,4,8]", "space.sequence_parallel=true",
         "space.node_orders=given")  # fmt: skip


def mixed(nodes: int, *devices: str) -> tuple[str, ...]:
    """Return the overrides of a cluster with groups of nodes of 8, each with its own device and links."""
    links = ("intra_node: {bandwidth_GBps: 450, latency_us: 10, efficiency: 0.822}, "
             "inter_node: {bandwidth_GBps: 400, latency_us: 6.8, efficiency: 0.848}")  # fmt: skip
    groups = ",".join(f"{{count: {nodes}, gpus: 8, device: {name}, {links}}}" for name in devices)
    added = (f"+device@cluster.devices.{name}={name}" for name in devices if name != "h100")
    return "cluster=h100_8x8", *added, f"cluster.nodes=[{groups}]"


CASES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "llama3_405b_4": (LLAMA, FOUR),
    "llama3_405b_7": (LLAMA, SEVEN),
    "mixtral_8x7b_7": (("model=mixtral_8x7b", "training=mixtral_8x7b", "cluster=h100_8x8", "space.pp=[1,2,4]",
                        "space.tp=[1,2,4]"), SEVEN),
    "deepseek_v3_7": (("model=deepseek_v3", "training=deepseek_v3", "cluster=h100_128x8", "space.pp=[8,16]",
                       "space.tp=[1,2]"), SEVEN),
    "gpt_530b_7": (("model=gpt3_175b", "model.num_layers=105", "model.hidden_size=20480", "model.num_heads=128",
                    "training=gpt3_175b", "training.global_batch_size=280", "cluster=a100_80_48x8",
                    "cluster.nodes.0.count=35", "space.tp=8", "space.pp=35", "space.virtual_stages=[1,3]"), SEVEN),
    "llama3_70b_16": ((*SMALL, "space.pp=[2,4,8]", *mixed(4, "h100", "h200")),
                      (*(f"nodes.{g}.{f}" for g in range(2) for f in SEVEN), *SHARED[:2])),
    "llama3_70b_31": ((*SMALL, "space.pp=[4,8]", *mixed(2, "h100", "h200", "b200", "a100_80")),
                      (*(f"nodes.{g}.{f}" for g in range(4) for f in SEVEN), *SHARED)),
}  # fmt: skip
"""Overrides of the job on its cluster, and knobs, at the prices of `conf/design/architects.yaml`."""
PUBLISHED = {
    "gpt_530b_7": (37.83, "measured on 280 A100: arXiv 2205.05198, table 5, which Calculon (SC'23) validates")
}
ENOUGH = 1e-4
"""Gap at which a method may stop."""


@dataclass
class DesignStudyOptions(StudyOptions):
    """Command line of `python -m experiments.design`."""

    publish: bool = True
    cases: list[str] = field(default_factory=lambda: list(CASES))
    methods: list[str] = field(default_factory=lambda: list(METHODS))
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2, 3, 4])
    calls: int = 300
    """Planner calls after which a method stops."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_members("cases", self.cases, tuple(CASES))
        require_members("methods", self.methods, tuple(METHODS))
        require_at_least("calls", self.calls, 10)


@dataclass(frozen=True)
class Spending:
    """Hold what one method found with one seed."""

    case: str
    method: str
    seed: int
    calls: int
    cpu_seconds: float
    iteration_time_s: float
    reference_s: float
    """Seconds per iteration on the hardware as it is."""
    bound_s: float
    calls_1: float
    """Calls to a gap of 1 %; infinite where it is never reached."""
    calls_01: float
    """Calls to a gap of 0.1 %."""
    seconds_1: float
    proven_1: float
    """Calls to a proven gap of 1 %; infinite for methods that prove nothing."""


class Enough(Exception):
    """End a method: its calls are spent, or its gap is small enough."""


def design_for(case: str) -> Design:
    """Return a case as a design with the budget of its reference."""
    overrides, names = CASES[case]
    raw: Any = OmegaConf.to_container(OmegaConf.load(Path(config_dir()) / "design" / "architects.yaml"))
    raw["jobs"] = [{"overrides": ["space=uniform", "space.zero_stage=1", *overrides]}]
    raw["options"] = {"reference": raw["options"].popitem()[1] | {"overrides": []}}
    raw["knobs"] = {name: raw["knobs"][".".join(name.split(".")[-2:])] for name in names}
    design = design_of(case, raw)
    (option,) = design.options
    return replace(
        design, budget=option.fixed + sum(knob.price for knob in option.knobs), tolerance=2 * ENOUGH
    )


class Planner:
    """The planner that all methods call, and what came of the calls so far."""

    def __init__(self, case: str, calls: int, bound: float) -> None:
        self.began, self.most, self.bound = time.process_time(), calls, bound
        design = design_for(case)
        self.branch = Designer(design).branches[0]
        self.option, self.pricing = self.branch.option, self.branch.pricings[0]
        self.money = design.budget - self.option.fixed
        self.prices, self.size = Prices.of(self.option.knobs), len(self.option.knobs)
        self.memory = np.array([knob in self.branch.memories for knob in self.option.knobs])
        self.trace: list[tuple[float, float]] = []
        """CPU seconds and the best log seconds by call."""

    def note(self, value: float) -> None:
        """Count a call that found log seconds `value`."""
        best = min(value, self.trace[-1][1] if self.trace else inf)
        self.trace.append((time.process_time() - self.began, best))
        if len(self.trace) >= self.most or best <= self.bound + ENOUGH:
            raise Enough

    def goodness(self, x: Array, prices: Prices | None = None, money: float | None = None) -> Array:
        """Return log goodness of knobs on which all money is spent in the reference's shares times exp(x)."""
        prices = prices or self.prices
        wanted = prices.price * np.exp(x - x.max()) * prices.exponent
        return prices.spend(-wanted[None], np.array([self.money if money is None else money]))[1][0]

    def __call__(self, x: Array) -> float:
        """Return log seconds of the best plan on shares x; of one that does not fit, with what it lacks."""
        z = self.goodness(np.asarray(x))
        with torch.no_grad():
            heights = self.pricing.log_seconds(torch.tensor(z[~self.memory])).numpy()
        lacks = (np.log(self.pricing.needs) - z[self.memory]).max(1, initial=-inf)
        fits = lacks <= 1e-9
        self.note(float(heights[fits].min()) if fits.any() else inf)
        return float(heights[fits].min() if fits.any() else heights.max() + lacks.min())


def bayesian(f: Planner, rng: np.random.Generator) -> None:
    """Optimise by a Gaussian process and log expected improvement (optuna's GPSampler)."""
    import optuna

    _ask_and_tell(f, optuna.samplers.GPSampler(seed=int(rng.integers(2**31))))


def tpe(f: Planner, rng: np.random.Generator) -> None:
    """Optimise by tree-structured Parzen estimators (optuna)."""
    import optuna

    _ask_and_tell(f, optuna.samplers.TPESampler(seed=int(rng.integers(2**31)), multivariate=True))


def _ask_and_tell(f: Planner, sampler: Any) -> None:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(sampler=sampler)
    study.enqueue_trial({f"x{i}": 0.0 for i in range(f.size)})
    study.optimize(
        lambda t: f(np.array([t.suggest_float(f"x{i}", -3.0, 3.0) for i in range(f.size)])), f.most
    )


def cmaes(f: Planner, rng: np.random.Generator) -> None:
    """Optimise by CMA-ES, restarted where it stops (cma)."""
    import cma

    start = np.zeros(f.size)
    while True:
        options = {"verbose": -9, "seed": int(rng.integers(1, 2**31))}
        strategy = cma.CMAEvolutionStrategy(start, 0.5, options)
        while not strategy.stop():
            points = strategy.ask()
            strategy.tell(points, [f(x) for x in points])
        start = rng.normal(size=f.size)


def coordinate(f: Planner, rng: np.random.Generator) -> None:
    """Try steps up and down in one share after the other, halved where none helps."""
    x = np.zeros(f.size)
    while True:
        value, step = f(x), 1.0
        while step > 0.02:
            before = value
            for i in rng.permutation(f.size):
                for sign in (step, -step):
                    y = x + sign * np.eye(f.size)[i]
                    if (found := f(y)) < value:
                        x, value = y, found
                        break
            step = step if value < before else step / 2
        x = rng.normal(size=f.size)


def random(f: Planner, rng: np.random.Generator) -> None:
    """Draw shares."""
    f(np.zeros(f.size))
    while True:
        f(rng.normal(size=f.size))


def _adam(x: Array, gradient: Callable[[Array, float], Array], steps: int) -> None:
    first, second = np.zeros_like(x), np.zeros_like(x)
    for step in range(1, steps + 1):
        g = gradient(x, step / steps)
        first, second = 0.8 * first + 0.2 * g, 0.99 * second + 0.01 * g * g
        rate = 0.25 * (1.0 - (step - 1) / steps)
        x = x - rate * (first / (1 - 0.8**step)) / (np.sqrt(second / (1 - 0.99**step)) + 1e-9)


def finite_differences(f: Planner, rng: np.random.Generator) -> None:
    """Descend by finite differences, as DeepFlow does."""

    def gradient(x: Array, _: float) -> Array:
        here = f(x)
        return np.array([(f(x + 1e-3 * axis) - here) / 1e-3 for axis in np.eye(f.size)])

    x = np.zeros(f.size)
    while True:
        _adam(x, gradient, 30)
        x = rng.normal(size=f.size) * 0.5


def one_loop(f: Planner, rng: np.random.Generator) -> None:
    """Descend shares and a soft minimum over plans in one loop, as DOSA does."""
    memory, needs = torch.tensor(f.memory), torch.tensor(np.log(f.pricing.needs))
    price, exponent = torch.tensor(f.prices.price), torch.tensor(f.prices.exponent)

    def gradient(x: Array, done: float) -> Array:
        point = torch.tensor(x, requires_grad=True)
        share = torch.softmax(point + price.log(), 0) * f.money
        z = ((share / price).log() / exponent).clamp(torch.tensor(f.prices.low), torch.tensor(f.prices.high))
        lacks = (needs - z[memory]).amax(1)
        heights = f.pricing.log_seconds(z[~memory])
        heat = 0.05 * (0.003 / 0.05) ** done
        soft = -heat * torch.logsumexp(-(heights + 10.0 * lacks.clamp(min=0.0)) / heat, 0)
        fits = heights.detach()[lacks <= 1e-9]
        f.note(float(fits.min()) if len(fits) else inf)
        return np.asarray(torch.autograd.grad(soft, point)[0].numpy())

    x = np.zeros(f.size)
    while True:
        _adam(x, gradient, 40)
        x = rng.normal(size=f.size) * 0.5


def share_rule(f: Planner, rng: np.random.Generator) -> None:
    """Move shares to slope over exponent of the optimal plan, its memory paid; restart from the next best plans.

    Plans are optimal for log seconds plus the worth of the money that their memory takes. A search on the line
    between the points of the last two plans ends every restart: the optimum may lie where plans change.
    """
    prices, memory = f.branch.prices, f.branch.memory_cost(f.pricing.needs)
    x, worth, ranks = np.zeros(len(prices.price)), 0.0, [int(np.median(memory.argsort()))]
    while True:
        plan, points = ranks[rng.geometric(0.5) % len(ranks)], dict[int, tuple[Array, float]]()
        for step in range(12):
            point = torch.tensor(f.goodness(x, prices, f.money - memory[plan]), requires_grad=True)
            heights, cost = f.pricing.log_seconds(point), prices.cost(point.detach().numpy())
            known = heights.detach().numpy()
            f.note(float(np.where(memory <= f.money - cost.sum() + 1e-9 * f.money, known, inf).min()))
            ranks = [int(p) for p in (known + worth * memory).argsort()[:8] if memory[p] < 0.9 * f.money]
            plan = ranks[0] if step > 1 else plan
            (slope,) = torch.autograd.grad(heights[plan], point)
            want = np.maximum(-slope.numpy(), 1e-5) / prices.exponent
            free = point.detach().numpy() < prices.high - 1e-6
            worth = float((want / cost)[free].max(initial=0.0))
            rate = 0.8 * 0.6 ** max(step - 5, 0)
            x = (1 - rate) * x + rate * (np.log(want / want.sum()) - np.log(prices.price))
            points[plan] = x, memory[plan]
            if step > 7 and len(points) > 1:
                (a, paid_a), (b, paid_b) = [*points.values()][-2:]
                x = a + (0.5, 0.25, 0.75, 0.9)[step - 8] * (b - a)
        x = x + rng.normal(size=len(x)) * 0.3


class TimedDesigner(Designer):
    """A designer that writes down when each call was over."""

    def __init__(self, design: Design) -> None:
        self.began, self.moments = time.process_time(), list[float]()
        super().__init__(design)

    def price(self, *given: Any) -> Any:
        """Price as a designer does."""
        found = super().price(*given)
        self.moments.append(time.process_time() - self.began)
        return found


@cache
def tangents(case: str) -> tuple[list[tuple[float, float]], float, float]:
    """Return CPU seconds and best log seconds by call, the log of the bound, and calls to a proven 1 %."""
    design = design_for(case)
    designer = TimedDesigner(design)
    answer = designer.solve(design.budget)
    coarse = Designer(replace(design, tolerance=0.02)).solve(design.budget)
    trace = [
        (moment, log(best)) for moment, (_, _, best) in zip(designer.moments, designer.history, strict=True)
    ]
    return trace, log(answer.bound_iteration_time_s), coarse.calls


METHODS: dict[str, Callable[[Planner, np.random.Generator], None] | None] = {
    "tangents": None, "share_rule": share_rule, "bayesian": bayesian, "cmaes": cmaes, "tpe": tpe,
    "coordinate": coordinate, "random": random, "finite_differences": finite_differences, "one_loop": one_loop,
}  # fmt: skip


def spend(task: tuple[str, str, int, int]) -> list[Spending]:
    """Run one method on one case with one seed."""
    case, method, seed, calls = task
    trace, bound, proven = tangents(case)
    solve, planner = METHODS[method], Planner(case, calls, bound)
    reference = planner.branch.pricings[0].needs  # fitting at the reference
    with torch.no_grad():
        heights = planner.pricing.log_seconds(torch.tensor(planner.pricing.start)).numpy()
    if solve is not None:
        try:
            solve(planner, np.random.default_rng(seed))
        except Enough:
            pass
        trace, proven = planner.trace, inf

    def first(gap: float) -> int:
        return next((n for n, (_, best) in enumerate(trace) if best <= bound + log(1 + gap)), -1)

    calls_1, calls_01 = (inf if first(gap) < 0 else first(gap) + 1 for gap in (0.01, 0.001))
    seconds_1 = inf if first(0.01) < 0 else trace[first(0.01)][0]
    fits = (reference <= 1 + 1e-9).all(1)
    return [Spending(case, method, seed, len(trace), trace[-1][0], exp(trace[-1][1]), exp(heights[fits].min()),
                     exp(bound), calls_1, calls_01, seconds_1, proven)]  # fmt: skip
