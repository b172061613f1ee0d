"""Ways to spend a budget on hardware, next to each other: tangents of all plans, the share rule, and rivals.

    python -m experiments.design                        # 9 minutes on two cores; needs the extra `rivals`

All spend the money of the reference hardware, where they begin, and call the same planner: all even uniform
plans at one point. Passes of slopes count in the seconds alone. Tangents end when their own bound proves a
gap; rivals within 0.01 % of a bound that tangents proved for longer than any method runs, after `calls`, or
once they have had `seconds` and ten times the calls to a proven 0.1 %. No descent by finite differences ends
before, so that seeds cannot differ.
"""

import time
from collections.abc import Callable, Iterable, Sequence
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
from scipy.optimize import minimize

from darts_parallel.config import config_dir, require_members, run_main
from darts_parallel.design import Answer, Design, Designer, design_of
from darts_parallel.errors import ConfigError
from darts_parallel.report import markdown_table
from experiments.study import Report, Study, StudyOptions, run_study

Array = NDArray[np.float64]
CASES: Any = OmegaConf.to_container(OmegaConf.load(Path(__file__).parent / "data" / "designs.yaml"))
ENOUGH = 1e-4  # gap at which a rival may stop
GAPS = (0.01, 0.001)
TIMES = 10  # calls that a rival has at least, over those of the proof


@dataclass
class DesignStudyOptions(StudyOptions):
    """Command line of `python -m experiments.design`."""

    cases: list[str] = field(default_factory=lambda: list(CASES))
    methods: list[str] = field(default_factory=lambda: list(METHODS))
    seeds: list[int] = field(default_factory=lambda: [*range(5)])
    calls: int = 300
    seconds: float = 2.5

    def __post_init__(self) -> None:
        super().__post_init__()
        require_members("cases", self.cases, tuple(CASES))
        require_members("methods", self.methods, tuple(METHODS))


@dataclass(frozen=True)
class Spending:
    """Hold what one method found with one seed; what is never reached is infinite."""

    case: str
    method: str
    seed: int
    reference_s: float
    bound_s: float
    iteration_time_s: float
    gap: float
    calls: float
    seconds: float
    calls_1: float
    seconds_1: float
    calls_01: float
    seconds_01: float


def design_for(case: str, tolerance: float) -> Design:
    """Return a case as a design with the money of its reference."""
    raw: Any = OmegaConf.to_container(
        OmegaConf.load(Path(config_dir()) / "design" / "architects.yaml")
    )
    given, scale = CASES[case], CASES[case].get("scale", 1.0)
    fixed = {unit: price * scale for unit, price in raw["options"].popitem()[1]["fixed"].items()}
    knobs = {name: dict(raw["knobs"][".".join(name.split(".")[-2:])]) for name in given["knobs"]}
    for name, knob in knobs.items():
        memory = given.get("memory") if name == "device.memory" else None
        knob["price"] = knob["price"] * scale if memory is None else memory
    raw |= {"knobs": knobs, "options": {"reference": {"fixed": fixed}}, "tolerance": tolerance}
    raw["jobs"] = [
        {"overrides": ["space=uniform", "space.zero_stage=1", *given["overrides"].split()]}
    ]
    design = design_of(case, raw)
    (option,) = design.options
    return replace(design, budget=option.fixed + float(option.knobs.price.sum()))


class Account:
    """The planner that rivals call, and its trace: number of the call, CPU seconds, best log seconds."""

    def __init__(self, case: str, bound: float, least: int, options: DesignStudyOptions) -> None:
        self.bound, self.least, self.options, design = (
            bound,
            least,
            options,
            design_for(case, ENOUGH),
        )
        self.began = time.process_time()
        (self.branch,) = Designer(design).branches
        (self.pricing,), self.knobs = self.branch.pricings, self.branch.option.knobs
        self.money, self.size = design.budget - self.branch.option.fixed, len(self.knobs.names)
        self.trace: list[tuple[int, float, float]] = []

    def note(self, heights: Array, fits: NDArray[np.bool_]) -> None:
        """Count a call that found log seconds of plans, some of which fit; the last one raises."""
        best = float(heights[fits].min(initial=self.trace[-1][2] if self.trace else inf))
        calls, seconds = len(self.trace) + 1, time.process_time() - self.began
        self.trace.append((calls, seconds, best))
        over = seconds > self.options.seconds and calls >= self.least
        if best <= self.bound + ENOUGH or calls >= self.options.calls or over:
            raise TimeoutError

    def goodness(self, x: Array, knobs: Any, money: float) -> Array:
        """Return log goodness of knobs on which all money is spent in the reference's shares times exp(x)."""
        wanted = knobs.price * np.exp(x - x.max()) * knobs.exponent
        return np.asarray(knobs.spend(-wanted[None], np.array([money]))[1][0])

    def __call__(self, x: Array) -> float:
        """Return log seconds of the best plan on shares x; of one that does not fit, with what it lacks."""
        z, memory = self.goodness(np.asarray(x), self.knobs, self.money), self.branch.is_memory
        with torch.no_grad():
            heights = self.pricing.log_seconds(torch.tensor(z[~memory])).numpy()
        lacks = (np.log(self.pricing.needs) - z[memory]).max(1, initial=-inf)
        fits = lacks <= 1e-9
        self.note(heights, fits)
        return float(heights[fits].min() if fits.any() else heights.max() + lacks.min())


# spends from a start; begun again at random, where it ends, until the account raises
Method = Callable[[Account, Array, np.random.Generator], Any]


def optuna_method(sampler: str, **arguments: Any) -> Method:
    """Return the method of a sampler of optuna."""

    def optimize(f: Account, start: Array, rng: np.random.Generator) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        chosen = getattr(optuna.samplers, sampler)(seed=int(rng.integers(2**31)), **arguments)
        study, names = optuna.create_study(sampler=chosen), [f"x{i}" for i in range(f.size)]
        study.enqueue_trial(dict(zip(names, start, strict=True)))
        study.optimize(lambda t: f(np.array([t.suggest_float(n, -3.0, 3.0) for n in names])))

    return optimize


def coordinate(f: Account, x: Array, rng: np.random.Generator) -> None:
    """Try a step up, then down, in one share after the other; halve steps where none helps."""
    value, step = f(x), 1.0
    while step > 0.02:
        before = value
        for axis in rng.permutation(np.eye(f.size)):
            for y in (x + step * axis, x - step * axis):
                if (found := f(y)) < value:
                    x, value = y, found
                    break
        step /= 1 if value < before else 2


def one_loop(f: Account, start: Array, rng: np.random.Generator) -> None:
    """Descend shares and a soft minimum over plans in one loop, as DOSA does (Adam)."""
    memory, needs = torch.tensor(f.branch.is_memory), torch.tensor(np.log(f.pricing.needs))
    price, exponent, low, high, _ = (
        torch.tensor(value) for value in list(vars(f.knobs).values())[1:]
    )
    point = torch.tensor(start, requires_grad=True)
    optimizer = torch.optim.Adam([point], lr=0.25, betas=(0.8, 0.99))
    for heat in np.geomspace(0.05, 0.003, 40).tolist():
        share = torch.softmax(point + price.log(), 0) * f.money
        z = ((share / price).log() / exponent).clamp(low, high)
        lacks = (needs - z[memory]).amax(1)
        heights = f.pricing.log_seconds(z[~memory])
        paid = f.knobs.cost(z.detach().numpy()).sum() <= f.money * (1 + 1e-9)
        f.note(heights.detach().numpy(), (lacks <= 1e-9).numpy() & paid)
        soft = -heat * torch.logsumexp(-(heights + 10.0 * lacks.clamp(min=0.0)) / heat, 0)
        (point.grad,) = torch.autograd.grad(soft, point)
        optimizer.step()


def share_rule(f: Account, start: Array, rng: np.random.Generator) -> None:
    """Move shares to slope over exponent of the best plan, its memory paid; restart from the next best."""
    knobs, memory = f.branch.knobs, f.branch.memory
    x, worth, ranks = start[~f.branch.is_memory], 0.0, [int(np.median(memory.argsort()))]
    while True:
        plan = ranks[rng.geometric(0.5) % len(ranks)]
        for step in range(12):
            z = f.goodness(x, knobs, f.money - memory[plan])
            point, cost = torch.tensor(z, requires_grad=True), knobs.cost(z)
            heights = f.pricing.log_seconds(point)
            known = heights.detach().numpy()
            f.note(known, memory <= f.money * (1 + 1e-9) - cost.sum())
            ranks = [
                int(p) for p in (known + worth * memory).argsort()[:8] if memory[p] < 0.9 * f.money
            ]
            plan = ranks[0] if step > 1 else plan
            (slope,) = torch.autograd.grad(heights[plan], point)
            want = np.maximum(-slope.numpy(), 1e-5) / knobs.exponent
            worth = float((want / cost)[z < knobs.high - 1e-6].max(initial=0.0))
            rate = 0.8 * 0.6 ** max(step - 5, 0)
            x = (1 - rate) * x + rate * (np.log(want / want.sum()) - np.log(knobs.price))
        x = x + rng.normal(size=len(x)) * 0.3


# finite differences descend as DeepFlow does
METHODS: dict[str, Method | None] = {
    "tangents": None,
    "share_rule": share_rule,
    "bayesian": optuna_method("GPSampler"),
    "cmaes": optuna_method("CmaEsSampler"),
    "tpe": optuna_method("TPESampler", multivariate=True),
    "coordinate": coordinate,
    "random": optuna_method("RandomSampler"),
    "finite_differences": lambda f, x, _: minimize(f, x, method="L-BFGS-B", options={"eps": 1e-3}),
    "one_loop": one_loop,
}
LIBRARY = {"bayesian": "optuna", "cmaes": "cmaes", "tpe": "optuna", "random": "optuna"}
Truth = tuple[float, float, int]  # seconds on the reference, bound for its money, calls to 0.1 %


def prove(case: str, gap: float) -> tuple[Designer, Answer, float]:
    """Solve a case by tangents until their bound proves a gap; return the CPU seconds, too."""
    design, began = design_for(case, 2 * gap), time.process_time()
    designer = Designer(design)
    return designer, designer.solve(design.budget, elasticities=False), time.process_time() - began


def truth(case: str) -> Truth:
    """Solve a case to a tenth of the smallest gap that any method is asked for."""
    (designer, answer, _), (_, usual, _) = prove(case, ENOUGH / 10), prove(case, GAPS[-1])
    (pricing,) = designer.branches[0].pricings
    reference = pricing.at_start.heights[(pricing.needs <= 1 + 1e-9).all(1)].min(initial=inf)
    return exp(reference), answer.bound_iteration_time_s, usual.planner_calls


def spend(task: tuple[str, str, int, DesignStudyOptions, Truth]) -> list[Spending]:
    """Run one method on one case with one seed."""
    case, method, seed, options, (reference, bound, proof) = task
    solve, reached = METHODS[method], list[float]()
    if solve is None:
        for gap in GAPS:
            _, answer, seconds = prove(case, gap)
            reached += answer.planner_calls, seconds
        last = (*reached[2:], log(answer.iteration_time_s))
    else:
        planner, rng = (
            Account(case, log(bound), TIMES * proof, options),
            np.random.default_rng(seed),
        )
        start = np.zeros(planner.size)
        with suppress(TimeoutError):
            while True:
                solve(planner, start, rng)
                start = rng.normal(size=planner.size) * 0.5
        for gap in GAPS:
            reached += next(
                (c[:2] for c in planner.trace if c[2] <= log(bound * (1 + gap))), (inf, inf)
            )
        last = planner.trace[-1]
    best = exp(last[2])
    return [
        Spending(
            case, method, seed, reference, bound, best, best / bound - 1.0, *last[:2], *reached
        )
    ]


COLUMNS = {
    "calls to 1 %": ("calls_1", ".0f"),
    "calls to 0.1 %": ("calls_01", ".0f"),
    "CPU s to 1 %": ("seconds_1", ".2f"),
    "CPU s to 0.1 %": ("seconds_01", ".2f"),
    "last gap": ("gap", ".2%"),
    "calls": ("calls", ".0f"),
    "CPU s": ("seconds", ".1f"),
}


def _cell(rows: Iterable[Spending], name: str, kind: str) -> str:
    """Return the median over seeds, and the least and the most where they differ."""
    values = sorted(float(getattr(row, name)) for row in rows)
    low, middle, high = (format(x, kind) for x in (values[0], median_high(values), values[-1]))
    return middle if low == high else f"{middle} ({low} to {high})"


def _ratio(found: dict[str, list[Spending]], unit: str, end: str) -> str:
    """Return the best rival's median over the tangents'; of none that arrives, what it spent."""
    median = {
        m: median_high(float(getattr(r, f"{unit}_{end}")) for r in rows)
        for m, rows in found.items()
    }
    ours, best = median.pop("tangents"), min(median.values())
    spent = [median_high(float(getattr(row, unit)) for row in found[m]) for m in median]
    return f"{best / ours:.1f}" if best < inf else f"more than {min(spent) / ours:.1f}"


def report(rows: Sequence[Spending]) -> Report:
    """Return a table for each case, and how the tangents fare."""
    parts: list[str | Sequence[str]] = [
        "Medians of the seeds, with the least and the most; inf: never."
    ]
    for case in dict.fromkeys(row.case for row in rows):
        own = [row for row in rows if row.case == case]
        found = {
            m: [row for row in own if row.method == m]
            for m in dict.fromkeys(row.method for row in own)
        }
        best, known, given = min(row.iteration_time_s for row in own), own[0], CASES[case]
        parts += [
            f"**{case}**, {len(given['knobs'])} knobs{given.get('published', '')}. {known.reference_s:.2f} s "
            f"on the reference in the model, {best:.2f} s for its money, none below {known.bound_s:.2f} s.",
            markdown_table(
                ("method", *COLUMNS),
                [
                    (m, *(_cell(r, *column) for column in COLUMNS.values()))
                    for m, r in found.items()
                ],
            ),
        ]
        found.pop("share_rule", None)
        if "tangents" in found and len(found) > 1:
            ends, units = (("1 %", "1"), ("0.1 %", "01")), ("calls", "seconds")
            times = [
                f"{_ratio(found, u, end)} times the {u} to {gap}"
                for gap, end in ends
                for u in units
            ]
            parts.append(f"The best rival takes {', '.join(times)} (tangents: proven).")
    return Report(*parts)


def run(options: DesignStudyOptions) -> int:
    """Run every method on every case; returns the exit status."""
    for method, library in LIBRARY.items():
        if method in options.methods and find_spec(library) is None:
            near = "pip install -e '.[rivals]'"
            raise ConfigError(
                f"methods=[{method}] needs {library}, which is not installed; try {near}."
            )
    study = Study(
        "design",
        "The best use of a budget for hardware: do slopes need fewer calls than black boxes?",
        "what cannot be enumerated, discrete choices, and arXiv 2506.15006, whose tables could not be read.",
        spend,
        report,
    )
    torch.set_num_threads(1)
    known = {case: truth(case) for case in options.cases}
    tasks = {
        f"{case}, {method}, seed {seed}": (case, method, seed, options, known[case])
        for case in options.cases
        for method in options.methods
        for seed in options.seeds[: 1 if method == "finite_differences" else None]
    }
    return run_study(study, tasks, options)


if __name__ == "__main__":
    raise SystemExit(run_main("experiments.design", __doc__, DesignStudyOptions, run))
