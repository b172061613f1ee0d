"""Ways to spend a budget on hardware, next to each other: tangents of all plans, the share rule, and rivals.

    python -m experiments.design                            # with the extra rivals: 20 minutes on two cores
    python -m experiments.design cases=[llama3_405b_4] methods=[tangents,cmaes] seeds=[0] calls=60

Every method has the budget of the reference hardware, may call the same planner (all even uniform plans at
one point) equally often, and begins at the reference. Rivals propose shares of the whole budget, memory's
among them, and are told how far the lightest plan is from fitting; their money is always fully spent within
the bounds. A gap is to the bound that the tangents prove. Slope passes are in the seconds, not in the calls.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from math import exp, inf, log
from pathlib import Path
from statistics import median_high
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from omegaconf import OmegaConf

from darts_parallel.config import config_dir, require_at_least, require_members, run_main
from darts_parallel.design import Design, Designer, Prices, design_of
from darts_parallel.errors import ConfigError
from darts_parallel.report import markdown_table
from experiments.study import Report, Study, StudyOptions, run_study

Array = NDArray[np.float64]
FOUR = ("device.peak_flops", "device.memory", "device.memory_bandwidth", "inter_node.bandwidth")
SEVEN = (*FOUR, "intra_node.bandwidth", "intra_node.latency", "inter_node.latency")
SHARED = ("inter_node.bandwidth", "inter_node.latency", "device.memory_bandwidth")
"""Figures that all groups have in common beyond their own: spine of the network, generation of HBM."""
LLAMA = ("model=llama3_405b", "training=llama3_405b", "cluster=h100_128x8", "space.tp=[4,8,16]",
         "space.pp=[8,16]", "space.recompute=[none,selective,full]",
         "space.sequence_parallel=true")  # fmt: skip
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
    "gpt_530b_7": (("model=gpt3_175b", "model.num_layers=105", "model.hidden_size=20480",
                    "model.num_heads=128", "training=gpt3_175b", "training.software=megatron_2021",
                    "training.global_batch_size=280", "cluster=a100_80_48x8", "cluster.nodes.0.count=35",
                    "space.tp=8", "space.pp=35", "space.virtual_stages=[1,3]"), SEVEN),
    "llama3_70b_16": ((*SMALL, "space.pp=[2,4,8]", *mixed(4, "h100", "h200")),
                      (*(f"nodes.{g}.{f}" for g in range(2) for f in SEVEN), *SHARED[:2])),
    "llama3_70b_31": ((*SMALL, "space.pp=[4,8]", *mixed(2, "h100", "h200", "b200", "a100_80")),
                      (*(f"nodes.{g}.{f}" for g in range(4) for f in SEVEN), *SHARED)),
}  # fmt: skip
"""Overrides of the job on its cluster, and knobs, at the prices of `conf/design/architects.yaml`."""
PUBLISHED = {"gpt_530b_7": "measured 37.83 s (arXiv 2205.05198, table 5, which Calculon, SC'23, validates); "}
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
    """Planner calls after which a rival stops."""
    seconds: float = 8.0
    """CPU seconds after which a rival stops: its own thinking counts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_members("cases", self.cases, tuple(CASES))
        require_members("methods", self.methods, tuple(METHODS))
        require_at_least("calls", self.calls, 10)
        require_at_least("seconds", self.seconds, 0, strict=True)


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
    bound_s: float
    calls_1: float
    """Calls to a gap of 1 %; infinite where it is never reached."""
    calls_01: float
    """Calls to a gap of 0.1 %."""
    seconds_1: float
    proven_1: float
    """Calls to a proven gap of 1 %; infinite for methods that prove nothing."""

    @property
    def gap(self) -> float:
        """Return the last gap."""
        return self.iteration_time_s / self.bound_s - 1.0


class EnoughError(Exception):
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


class Account:
    """The planner that all methods call, and what came of the calls so far."""

    def __init__(self, case: str, calls: int, seconds: float, bound: float) -> None:
        design = design_for(case)
        self.began, self.most, self.seconds, self.bound = time.process_time(), calls, seconds, bound
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
        over = len(self.trace) >= self.most or self.trace[-1][0] > self.seconds
        if over or best <= self.bound + ENOUGH:
            raise EnoughError

    def goodness(self, x: Array, prices: Prices | None = None, money: float | None = None) -> Array:
        """Return log goodness of knobs on which all money is spent in the reference's shares times exp(x)."""
        prices = prices or self.prices
        wanted = prices.price * np.exp(x - x.max()) * prices.exponent
        z: Array = prices.spend(-wanted[None], np.array([self.money if money is None else money]))[1][0]
        return z

    def __call__(self, x: Array) -> float:
        """Return log seconds of the best plan on shares x; of one that does not fit, with what it lacks."""
        z = self.goodness(np.asarray(x))
        with torch.no_grad():
            heights = self.pricing.log_seconds(torch.tensor(z[~self.memory])).numpy()
        lacks = (np.log(self.pricing.needs) - z[self.memory]).max(1, initial=-inf)
        fits = lacks <= 1e-9
        self.note(float(heights[fits].min()) if fits.any() else inf)
        return float(heights[fits].min() if fits.any() else heights.max() + lacks.min())


def bayesian(f: Account, rng: np.random.Generator) -> None:
    """Optimise by a Gaussian process and log expected improvement (optuna's GPSampler)."""
    import optuna

    _ask_and_tell(f, optuna.samplers.GPSampler(seed=int(rng.integers(2**31))))


def tpe(f: Account, rng: np.random.Generator) -> None:
    """Optimise by tree-structured Parzen estimators (optuna)."""
    import optuna

    _ask_and_tell(f, optuna.samplers.TPESampler(seed=int(rng.integers(2**31)), multivariate=True))


def _ask_and_tell(f: Account, sampler: Any) -> None:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(sampler=sampler)
    study.enqueue_trial({f"x{i}": 0.0 for i in range(f.size)})
    study.optimize(
        lambda t: f(np.array([t.suggest_float(f"x{i}", -3.0, 3.0) for i in range(f.size)])), f.most
    )


def cmaes(f: Account, rng: np.random.Generator) -> None:
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


def coordinate(f: Account, rng: np.random.Generator) -> None:
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


def random(f: Account, rng: np.random.Generator) -> None:
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


def finite_differences(f: Account, rng: np.random.Generator) -> None:
    """Descend by finite differences, as DeepFlow does."""

    def gradient(x: Array, _: float) -> Array:
        here = f(x)
        return np.array([(f(x + 1e-3 * axis) - here) / 1e-3 for axis in np.eye(f.size)])

    x = np.zeros(f.size)
    while True:
        _adam(x, gradient, 30)
        x = rng.normal(size=f.size) * 0.5


def one_loop(f: Account, rng: np.random.Generator) -> None:
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


def share_rule(f: Account, rng: np.random.Generator) -> None:
    """Move shares to slope over exponent of the optimal plan, its memory paid; restart from the next best.

    Plans are optimal for log seconds plus the worth of the money of their memory. A search on the line
    between the points of the last two plans ends every restart: the optimum may lie where plans change.
    """
    prices, memory = f.branch.prices, f.branch.memory_cost(f.pricing.needs)
    x, worth, ranks = np.zeros(len(prices.price)), 0.0, [int(np.median(memory.argsort()))]
    while True:
        plan, points = ranks[rng.geometric(0.5) % len(ranks)], dict[int, Array]()
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
            points[plan] = x
            if step > 7 and len(points) > 1:
                a, b = [*points.values()][-2:]
                x = a + (0.5, 0.25, 0.75, 0.9)[step - 8] * (b - a)
        x = x + rng.normal(size=len(x)) * 0.3


Proof = tuple[list[tuple[float, float]], float, float]
"""CPU seconds and best log seconds by call, log of the bound, calls to a proven 1 %."""


def tangents(case: str) -> Proof:
    """Solve a case by tangents, and once more until 1 % is proven."""
    design = design_for(case)
    began = time.process_time()
    designer = Designer(design)
    answer = designer.solve(design.budget)
    coarse = Designer(replace(design, tolerance=0.02)).solve(design.budget)
    trace = [(moment - began, log(best)) for _, _, best, moment in designer.history]
    return trace, log(answer.bound_iteration_time_s), coarse.calls


METHODS: dict[str, Callable[[Account, np.random.Generator], None] | None] = {
    "tangents": None, "share_rule": share_rule, "bayesian": bayesian, "cmaes": cmaes, "tpe": tpe,
    "coordinate": coordinate, "random": random, "finite_differences": finite_differences,
    "one_loop": one_loop,
}  # fmt: skip


def spend(task: tuple[str, str, int, DesignStudyOptions, Proof]) -> list[Spending]:
    """Run one method on one case with one seed."""
    case, method, seed, options, (trace, bound, proven) = task
    solve, planner = METHODS[method], Account(case, options.calls, options.seconds, bound)
    with torch.no_grad():
        heights = planner.pricing.log_seconds(torch.tensor(planner.pricing.start)).numpy()
    reference = heights[(planner.pricing.needs <= 1 + 1e-9).all(1)].min()
    if solve is not None:
        with suppress(EnoughError):
            solve(planner, np.random.default_rng(seed))
        trace, proven = planner.trace, inf
    reached = [next((n for n, (_, best) in enumerate(trace) if best <= bound + log(1 + gap)), None)
               for gap in (0.01, 0.001)]  # fmt: skip
    calls_1, calls_01 = (inf if n is None else n + 1 for n in reached)
    seconds_1 = inf if reached[0] is None else trace[reached[0]][0]
    return [Spending(case, method, seed, len(trace), trace[-1][0], exp(trace[-1][1]), exp(reference),
                     exp(bound), calls_1, calls_01, seconds_1, proven)]  # fmt: skip


COLUMNS = {"calls to 1 %": ("calls_1", ".0f"), "calls to 0.1 %": ("calls_01", ".0f"),
           "CPU s to 1 %": ("seconds_1", ".1f"), "last gap": ("gap", ".2%"), "calls": ("calls", ".0f"),
           "CPU s": ("cpu_seconds", ".1f")}  # fmt: skip


def _medians(rows: Sequence[Spending]) -> dict[str, float]:
    """Return the medians over seeds of what a table shows."""
    names = [name for name, _ in COLUMNS.values()]
    return {name: median_high(float(getattr(row, name)) for row in rows) for name in names}


def report(rows: Sequence[Spending]) -> Report:
    """Return a table for each case, and how the tangents fare."""
    parts: list[str | Sequence[str]] = []
    for case in dict.fromkeys(row.case for row in rows):
        own = [row for row in rows if row.case == case]
        found = {m: _medians([r for r in own if r.method == m]) for m in dict.fromkeys(r.method for r in own)}
        seconds, best = own[0].reference_s, min(row.iteration_time_s for row in own)
        parts.append(
            f"**{case}**, {len(CASES[case][1])} knobs: {PUBLISHED.get(case, '')}{seconds:.2f} s on the "
            f"reference in the model, {best:.2f} s for the same money, no less than {own[0].bound_s:.2f} s."
        )
        cells = [(m, *(format(f[name], kind) for name, kind in COLUMNS.values())) for m, f in found.items()]
        parts.append(markdown_table(("method", *COLUMNS), cells))
        rivals = [f for m, f in found.items() if m not in ("tangents", "share_rule")]
        if "tangents" in found and rivals:
            ours, proven = found["tangents"], min(row.proven_1 for row in own)
            calls = min(min(f["calls_1"], f["calls"]) for f in rivals)
            seconds = min(min(f["seconds_1"], f["cpu_seconds"]) for f in rivals)
            least = "at least " if all(f["calls_1"] == inf for f in rivals) else ""
            parts.append(
                f"Proven to 1 % after {proven:.0f} calls. The best rival takes {least}"
                f"{calls / ours['calls_1']:.1f} times the calls to 1 %, {least}"
                f"{seconds / ours['seconds_1']:.1f} times the seconds."
            )
    return Report(f"Medians of {len({row.seed for row in rows})} seeds; inf: never.", *parts)


def run(options: DesignStudyOptions) -> int:
    """Run every method on every case; returns the exit status."""
    study = Study(
        "design",
        "The best use of a budget for hardware: do slopes need fewer planner calls than black boxes?",
        "spaces that cannot be enumerated, and discrete choices; all prices are those of one H100 server.",
        spend,
        report,
    )
    for method, library in (("cmaes", "cma"), ("tpe", "optuna"), ("bayesian", "optuna")):
        if method in options.methods and find_spec(library) is None:
            near = "pip install 'darts-parallel[rivals]'"
            raise ConfigError(f"methods=[{method}] needs {library}, which is not installed; try {near}.")
    torch.set_num_threads(1)
    proofs = {case: tangents(case) for case in options.cases}
    tasks = {f"{case}, {method}, seed {seed}": (case, method, seed, options, proofs[case])
             for case in options.cases for method in options.methods
             for seed in (options.seeds if METHODS[method] else options.seeds[:1])}  # fmt: skip
    return run_study(study, tasks, options)


if __name__ == "__main__":
    raise SystemExit(run_main("experiments.design", __doc__, DesignStudyOptions, run))
