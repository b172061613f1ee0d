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
from itertools import product
from math import exp, inf, log
from pathlib import Path
from statistics import median_high
from typing import Any, NamedTuple

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
ENOUGH = 1e-4
"""Gap at which a rival may stop."""
GAPS = (0.01, 0.001)
"""Gaps whose first calls and seconds are counted."""
TIMES = 10
"""Calls that a rival has at least, over those of the proof."""
ROUNDING = 1e-9
"""Share of money or log bytes by which a plan may exceed its limit."""


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
    """Calls until 1 % above the bound."""
    seconds_1: float
    calls_01: float
    """Calls until 0.1 % above the bound."""
    seconds_01: float


def design_for(case: str, tolerance: float) -> Design:
    """Return a case as a design with the money of its reference."""
    path = Path(config_dir()) / "design" / "architects.yaml"
    raw: Any = OmegaConf.to_container(OmegaConf.load(path))
    given = CASES[case]
    scale = given.get("scale", 1.0)
    fixed = {unit: price * scale for unit, price in raw["options"].popitem()[1]["fixed"].items()}
    knobs = {}
    for name in given["knobs"]:
        knob = dict(raw["knobs"][".".join(name.split(".")[-2:])])
        knob["price"] *= scale
        if name == "device.memory":
            knob["price"] = given.get("memory", knob["price"])
        knobs[name] = knob
    overrides = ["space=uniform", "space.zero_stage=1", *given["overrides"].split()]
    raw |= {"knobs": knobs, "options": {"reference": {"fixed": fixed}}, "tolerance": tolerance}
    raw["jobs"] = [{"overrides": overrides}]
    design = design_of(case, raw)
    (option,) = design.options
    return replace(design, budget=option.fixed + float(option.knobs.price.sum()))


class Call(NamedTuple):
    """State after a call of the planner."""

    number: float
    seconds: float
    """CPU seconds."""
    best: float
    """Best log seconds."""


class Account:
    """The planner that rivals call, and the trace of their calls.

    Args:
        bound: Log seconds that no plan is below.
        least: Calls that a rival has in any case.
    """

    def __init__(
        self,
        case: str,
        bound: float,
        least: float,
        options: DesignStudyOptions,
    ) -> None:
        self.bound = bound
        self.least = least
        self.options = options
        self.began = time.process_time()
        design = design_for(case, ENOUGH)
        (self.branch,) = Designer(design).branches
        (self.pricing,) = self.branch.pricings
        self.knobs = self.branch.option.knobs
        self.money = design.budget - self.branch.option.fixed
        self.size = len(self.knobs.names)
        self.trace: list[Call] = []

    def note(self, heights: Array, fits: NDArray[np.bool_]) -> None:
        """Count a call that found log seconds of plans, some of which fit; the last one raises."""
        before = self.trace[-1].best if self.trace else inf
        best = float(heights[fits].min(initial=before))
        calls = len(self.trace) + 1
        seconds = time.process_time() - self.began
        self.trace.append(Call(calls, seconds, best))
        over = seconds > self.options.seconds and calls >= self.least
        if best <= self.bound + ENOUGH or calls >= self.options.calls or over:
            raise TimeoutError

    def reached(self, log_seconds: float) -> Call:
        """Return the first call after which the best plan was as fast; infinite where none was."""
        calls = (call for call in self.trace if call.best <= log_seconds)
        return next(calls, NEVER)

    def goodness(self, x: Array, knobs: Any, money: float) -> Array:
        """Return log goodness of knobs on which all money is spent in the reference's shares times exp(x)."""
        wanted = knobs.price * np.exp(x - x.max()) * knobs.exponent
        return np.asarray(knobs.spend(-wanted[None], np.array([money]))[1][0])

    def __call__(self, x: Array) -> float:
        """Return log seconds of the best plan on shares x; of one that does not fit, with what it lacks."""
        z = self.goodness(np.asarray(x), self.knobs, self.money)
        memory = self.branch.is_memory
        with torch.no_grad():
            heights = self.pricing.log_seconds(torch.tensor(z[~memory])).numpy()
        lacks = (np.log(self.pricing.needs) - z[memory]).max(1, initial=-inf)
        fits = lacks <= ROUNDING
        self.note(heights, fits)
        return float(heights[fits].min() if fits.any() else heights.max() + lacks.min())


Method = Callable[[Account, Array, np.random.Generator], Any]
"""Spends from a start; begun again at random, where it ends, until the account raises."""
NEVER = Call(inf, inf, inf)


def optuna_method(sampler: str, **arguments: Any) -> Method:
    """Return the method of a sampler of optuna."""

    def optimize(f: Account, start: Array, rng: np.random.Generator) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        seed = int(rng.integers(2**31))
        chosen = getattr(optuna.samplers, sampler)(seed=seed, **arguments)
        study = optuna.create_study(sampler=chosen)
        names = [f"x{axis}" for axis in range(f.size)]
        study.enqueue_trial(dict(zip(names, start, strict=True)))

        def objective(trial: Any) -> float:
            return f(np.array([trial.suggest_float(name, -3.0, 3.0) for name in names]))

        study.optimize(objective)

    return optimize


def coordinate(f: Account, x: Array, rng: np.random.Generator) -> None:
    """Try a step up, then down, in one share after the other; halve steps where none helps."""
    value = f(x)
    step = 1.0
    while step > 0.02:
        before = value
        for axis in rng.permutation(np.eye(f.size)):
            for moved in (x + step * axis, x - step * axis):
                found = f(moved)
                if found < value:
                    x = moved
                    value = found
                    break
        step /= 1 if value < before else 2


def one_loop(f: Account, start: Array, rng: np.random.Generator) -> None:
    """Descend shares and a soft minimum over plans in one loop, as DOSA does (Adam)."""
    memory = torch.tensor(f.branch.is_memory)
    needs = torch.tensor(np.log(f.pricing.needs))
    price = torch.tensor(f.knobs.price)
    exponent = torch.tensor(f.knobs.exponent)
    low = torch.tensor(f.knobs.low)
    high = torch.tensor(f.knobs.high)
    point = torch.tensor(start, requires_grad=True)
    optimizer = torch.optim.Adam([point], lr=0.25, betas=(0.8, 0.99))
    for heat in np.geomspace(0.05, 0.003, 40).tolist():
        share = torch.softmax(point + price.log(), 0) * f.money
        z = ((share / price).log() / exponent).clamp(low, high)
        lacks = (needs - z[memory]).amax(1)
        heights = f.pricing.log_seconds(z[~memory])
        paid = f.knobs.cost(z.detach().numpy()).sum() <= f.money * (1 + ROUNDING)
        f.note(heights.detach().numpy(), (lacks <= ROUNDING).numpy() & paid)
        soft = -heat * torch.logsumexp(-(heights + 10.0 * lacks.clamp(min=0.0)) / heat, 0)
        (point.grad,) = torch.autograd.grad(soft, point)
        optimizer.step()


def share_rule(f: Account, start: Array, rng: np.random.Generator) -> None:
    """Move shares to slope over exponent of the best plan, its memory paid; restart from the next best."""
    knobs = f.branch.knobs
    memory = f.branch.memory
    x = start[~f.branch.is_memory]
    worth = 0.0
    ranks = [int(np.median(memory.argsort()))]
    while True:
        plan = ranks[rng.geometric(0.5) % len(ranks)]
        for step in range(12):
            z = f.goodness(x, knobs, f.money - memory[plan])
            cost = knobs.cost(z)
            point = torch.tensor(z, requires_grad=True)
            heights = f.pricing.log_seconds(point)
            known = heights.detach().numpy()
            f.note(known, memory <= f.money * (1 + ROUNDING) - cost.sum())
            leading = (known + worth * memory).argsort()[:8]
            ranks = [int(rank) for rank in leading if memory[rank] < 0.9 * f.money]
            plan = ranks[0] if step > 1 else plan
            (slope,) = torch.autograd.grad(heights[plan], point)
            want = np.maximum(-slope.numpy(), 1e-5) / knobs.exponent
            worth = float((want / cost)[z < knobs.high - 1e-6].max(initial=0.0))
            rate = 0.8 * 0.6 ** max(step - 5, 0)
            x = (1 - rate) * x + rate * (np.log(want / want.sum()) - np.log(knobs.price))
        x = x + rng.normal(size=len(x)) * 0.3


def finite_differences(f: Account, start: Array, rng: np.random.Generator) -> None:
    """Descend by finite differences, as DeepFlow does."""
    minimize(f, start, method="L-BFGS-B", options={"eps": 1e-3})


bayesian = optuna_method("GPSampler")
cmaes = optuna_method("CmaEsSampler")
tpe = optuna_method("TPESampler", multivariate=True)
random = optuna_method("RandomSampler")
METHODS: dict[str, Method | None] = {
    "tangents": None,
    "share_rule": share_rule,
    "bayesian": bayesian,
    "cmaes": cmaes,
    "tpe": tpe,
    "coordinate": coordinate,
    "random": random,
    "finite_differences": finite_differences,
    "one_loop": one_loop,
}
"""Rivals by name; tangents are the planner's own."""
LIBRARY = {"bayesian": "optuna", "cmaes": "cmaes", "tpe": "optuna", "random": "optuna"}


class Truth(NamedTuple):
    """Proof of a case."""

    reference_s: float
    """Seconds of the best plan on the reference hardware."""
    bound_s: float
    """Seconds that no hardware for the same money is below."""
    calls: float
    """Planner calls until tangents prove the smallest of `GAPS`."""


class Task(NamedTuple):
    """One method on one case with one seed."""

    case: str
    method: str
    seed: int
    options: DesignStudyOptions
    truth: Truth


class Proof(NamedTuple):
    """The answer of tangents that a bound proves, with its designer and CPU seconds."""

    designer: Designer
    answer: Answer
    seconds: float

    @property
    def call(self) -> Call:
        """Return the last call of the planner."""
        return Call(self.answer.planner_calls, self.seconds, log(self.answer.iteration_time_s))


def prove(case: str, gap: float) -> Proof:
    """Solve a case by tangents until their bound proves a gap."""
    design = design_for(case, 2 * gap)
    began = time.process_time()
    designer = Designer(design)
    answer = designer.solve(design.budget, elasticities=False)
    return Proof(designer, answer, time.process_time() - began)


def truth(case: str) -> Truth:
    """Solve a case to a tenth of the smallest gap that any method is asked for."""
    closest = prove(case, ENOUGH / 10)
    usual = prove(case, GAPS[-1])
    (pricing,) = closest.designer.branches[0].pricings
    fits = (pricing.needs <= 1 + ROUNDING).all(1)
    reference = exp(pricing.at_start.heights[fits].min(initial=inf))
    return Truth(reference, closest.answer.bound_iteration_time_s, usual.answer.planner_calls)


def spend(task: Task) -> list[Spending]:
    """Run one method on one case with one seed."""
    bound = task.truth.bound_s
    solve = METHODS[task.method]
    if solve is None:
        reached = [prove(task.case, gap).call for gap in GAPS]
        last = reached[-1]
    else:
        account = _spent(task, solve)
        reached = [account.reached(log(bound * (1 + gap))) for gap in GAPS]
        last = account.trace[-1]
    best = exp(last.best)
    counts = [figure for call in (last, *reached) for figure in (call.number, call.seconds)]
    place = (task.case, task.method, task.seed, task.truth.reference_s)
    return [Spending(*place, bound, best, best / bound - 1.0, *counts)]


def _spent(task: Task, solve: Method) -> Account:
    """Run a rival again and again until its account is used up."""
    least = TIMES * task.truth.calls
    account = Account(task.case, log(task.truth.bound_s), least, task.options)
    rng = np.random.default_rng(task.seed)
    start = np.zeros(account.size)
    with suppress(TimeoutError):
        while True:
            solve(account, start, rng)
            start = rng.normal(size=account.size) * 0.5
    return account


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


def _median(rows: Iterable[Spending], name: str) -> float:
    return median_high(float(getattr(row, name)) for row in rows)


def _ratio(found: dict[str, list[Spending]], unit: str, end: str) -> str:
    """Return the best rival's median over the tangents'; of none that arrives, what it spent."""
    ours = _median(found["tangents"], f"{unit}_{end}")
    rivals = [rows for method, rows in found.items() if method != "tangents"]
    best = min(_median(rows, f"{unit}_{end}") for rows in rivals)
    if best < inf:
        return f"{best / ours:.1f}"
    return f"more than {min(_median(rows, unit) for rows in rivals) / ours:.1f}"


def report(rows: Sequence[Spending]) -> Report:
    """Return a table for each case, and how the tangents fare."""
    cases: dict[str, dict[str, list[Spending]]] = {}
    for row in rows:
        cases.setdefault(row.case, {}).setdefault(row.method, []).append(row)
    parts: list[str | Sequence[str]] = [
        "Medians of the seeds, with the least and the most; inf: never."
    ]
    for case, found in cases.items():
        parts += [_heading(case, found), _table(found)]
        found.pop("share_rule", None)
        if "tangents" in found and len(found) > 1:
            parts.append(_duel(found))
    return Report(*parts)


def _heading(case: str, found: dict[str, list[Spending]]) -> str:
    rows = [row for own in found.values() for row in own]
    best = min(row.iteration_time_s for row in rows)
    given = CASES[case]
    reference = f"{rows[0].reference_s:.2f} s on the reference in the model"
    money = f"{best:.2f} s for its money, none below {rows[0].bound_s:.2f} s."
    knobs = f"{len(given['knobs'])} knobs{given.get('published', '')}"
    return f"**{case}**, {knobs}. {reference}, {money}"


def _table(found: dict[str, list[Spending]]) -> list[str]:
    lines = []
    for method, rows in found.items():
        lines.append((method, *(_cell(rows, *column) for column in COLUMNS.values())))
    return markdown_table(("method", *COLUMNS), lines)


def _duel(found: dict[str, list[Spending]]) -> str:
    times = []
    for gap, end in (("1 %", "1"), ("0.1 %", "01")):
        for unit in ("calls", "seconds"):
            times.append(f"{_ratio(found, unit, end)} times the {unit} to {gap}")
    return f"The best rival takes {', '.join(times)} (tangents: proven)."


def run(options: DesignStudyOptions) -> int:
    """Run every method on every case; returns the exit status."""
    for method, library in LIBRARY.items():
        if method in options.methods and find_spec(library) is None:
            near = "pip install -r experiments/requirements.txt"
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
    tasks = {}
    for case, method in product(options.cases, options.methods):
        seeds = options.seeds[:1] if method == "finite_differences" else options.seeds
        for seed in seeds:
            task = Task(case, method, seed, options, known[case])
            tasks[f"{case}, {method}, seed {seed}"] = task
    return run_study(study, tasks, options)


if __name__ == "__main__":
    raise SystemExit(run_main("experiments.design", __doc__, DesignStudyOptions, run))
