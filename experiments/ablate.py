"""Ablate the search: one change at a time, and rivals at equal wall-clock.

python -m experiments.ablate                             every variant, 3 problems, 10 seeds
python -m experiments.ablate quick=true                  a first try: toy, few steps
python -m experiments.ablate variants=[default,gumbel] problems=[gpt2_tight] seeds=3

A variant without a descent is read off its curve at the default's median seconds.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from matplotlib.figure import Figure

from baselines import PLANNERS
from darts_parallel.bilevel import (
    REFERENCE,
    SCHEDULE,
    BilevelLoop,
    BilevelSettings,
    compared,
    judged,
    load_corpus,
    times,
)
from darts_parallel.config import SearchConfig, require_at_least, require_members, run_main
from darts_parallel.exact import find_layerwise_plan
from darts_parallel.gradient import GradientSearch
from darts_parallel.problem import load_problem
from darts_parallel.report import markdown_table
from experiments.comparison.controls import CONTROLS
from experiments.comparison.curves import curves_csv
from experiments.comparison.problems import suite
from experiments.comparison.quantiles import percent, quantile, read_curve
from experiments.comparison.runs import MethodRun, answered, searched
from experiments.study import Report, Study, StudyOptions, run_study

PROBLEMS = {
    "gpt2_tight": "gpt2_xl on a10_4x4, tight",
    "v100_tight": "gpt2_xl on v100_4x8, tight",
    "mixed": "gpt2_xl on a10_a100_mixed, loose",
    "bert_tight": "bert_345m on a10_4x4, tight",
    "bert_uneven": "bert_345m on a10_8x4, uneven",
    "t5_loose": "t5_1_3b on a10_4x4, loose",
    "toy_tight": "toy on toy, tight",
}
"""Short names of problems of `comparison/problems.py`."""
ALONE = ("gpt2_tight", "bert_uneven", "toy_tight")
"""Problems where none is named: tight memory, and layers that all differ."""
BASE: dict[str, Any] = {"num_steps": 150, "num_restarts": 16}
"""Settings of every gradient variant: a quarter of the search's own restart-steps, so that ten seeds end."""
FEW: dict[str, Any] = {"num_steps": 10, "num_restarts": 2}
"""Settings of a first try."""
DEFAULT, NO_DESCENT, BILEVEL = "default", "no_descent", "bilevel"
EQUAL_TIME = "at the default's seconds"


@dataclass(frozen=True)
class Variant:
    """Change fields of `SearchConfig`, or the loop that descends."""

    question: str
    changes: dict[str, Any] = field(default_factory=dict)
    loop: type[GradientSearch] = GradientSearch


QUESTIONS = {
    DEFAULT: "the search, at 150 steps",
    "temperature_high": "temperature schedule",
    "temperature_low": "temperature schedule",
    "restarts_4": "restarts (16)",
    "restarts_64": "restarts (16)",
    "gumbel": "softmax or Gumbel samples",
    "fixed_penalty": "augmented Lagrangian or penalty",
    "repair_only": "rounded plans fitted to the memory",
    "fill_only": "rounded plans fitted to the memory",
    "prices_only": "rounded plans fitted to the memory",
    "moves_only": "polishing by exact segment programs",
    "no_gradient": "gradients or noise of their size",
    NO_DESCENT: EQUAL_TIME,
    "random_search": EQUAL_TIME,
    "annealing": EQUAL_TIME,
    "flexflow": EQUAL_TIME,
}
"""Question that each variant answers, by its name."""
CHANGES: dict[str, dict[str, Any]] = {
    "temperature_high": {"temperature": [2.0, 0.5]},
    "temperature_low": {"temperature": [0.2, 0.05]},
    "restarts_4": {"num_restarts": 4},
    "restarts_64": {"num_restarts": 64},
    "gumbel": {"relaxation": "gumbel"},
    "fixed_penalty": {"multiplier_step": 0.0},
    "repair_only": {"fitting": "repair"},
    "fill_only": {"fitting": "fill"},
    "prices_only": {"fitting": "prices"},
    "moves_only": {"polish_labels": 0},
}
"""Fields of `SearchConfig` that a variant changes."""
VARIANTS = {
    name: Variant(question, CHANGES.get(name, {}), CONTROLS.get(name, GradientSearch))
    for name, question in QUESTIONS.items()
}
"""Variants by name; those without a descent have `budget` seconds and are read at those of the default."""
ORDERS = {"bilevel_first_order": "first", "bilevel_second_order": "second"}
"""Variants that are a bilevel search, a problem of its own."""
BILEVEL_SIZES = [
    "experiment=bilevel",
    "model.num_layers=2",
    "model.hidden_size=32",
    "training.seq_len=32",
    "bilevel.num_steps=60",
    "bilevel.warmup_steps=20",
    "bilevel.retrain_steps=120",
    "bilevel.validation_sequences=32",
    "bilevel.trial_steps=10",
    "bilevel.logit_every=1",
    "bilevel.batch_candidates=[]",
    "bilevel.estimator=mixture",
]
"""A bilevel search of seconds: it compares the orders, not the plans with the world."""


@dataclass
class AblateOptions(StudyOptions):
    """Command line of `python -m experiments.ablate`."""

    problems: list[str] = field(default_factory=lambda: list(ALONE))
    variants: list[str] = field(default_factory=lambda: [*VARIANTS, *ORDERS])
    seeds: int = 10
    """Seeds 0 to `seeds` - 1."""
    budget: float = 4.0
    """Seconds of a rival; its plan is read off its curve at the search's own seconds."""
    quick: bool = False
    """One easy problem, two seeds, few steps: whether it works, nothing else."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least("seeds", self.seeds, 1)
        require_at_least("budget", self.budget, 0, strict=True)
        require_members("problems", self.problems, tuple(PROBLEMS))
        require_members("variants", self.variants, (*VARIANTS, *ORDERS))
        if self.quick:
            self.problems, self.seeds, self.budget = ["toy_tight"], min(self.seeds, 2), 0.2


def run_variant(task: tuple[str, str, float], options: AblateOptions) -> list[MethodRun]:
    """Run a variant with every seed.

    Args:
        task: Problem, variant, and the optimum in seconds per iteration.
    """
    torch.set_num_threads(1)
    problem, name, optimum = task
    if name in ORDERS:
        return [bilevel_run(name, seed, options.quick) for seed in range(options.seeds)]
    tables, runs = suite([PROBLEMS[problem]])[0].tables(), []
    variant = VARIANTS[name]
    seconds = options.budget if name == NO_DESCENT else 600.0
    config = replace(SearchConfig(max_seconds=seconds), **BASE | variant.changes)
    config = replace(config, **FEW) if options.quick else config
    for seed in range(options.seeds):
        if name in PLANNERS:
            began = time.monotonic()
            answer = PLANNERS[name](tables, "layerwise", deadline=began + options.budget, seed=seed)
            runs.append(answered(problem, name, seed, answer, began))
        else:
            runs.append(searched(problem, name, seed, tables, config, variant.loop))
    return [run.against(optimum) for run in runs]


def bilevel_run(name: str, seed: int, quick: bool) -> MethodRun:
    """Retrain the plan that a bilevel search finds; its gap is to the time to target at 16 bits."""
    few = (
        ["bilevel.num_steps=4", "bilevel.warmup_steps=2", "bilevel.retrain_steps=20"]
        if quick
        else []
    )
    order = f"bilevel.order={ORDERS[name]}"
    problem = load_problem([*BILEVEL_SIZES, *few, order, f"search.seed={seed}"])
    began = time.process_time()
    loop = BilevelLoop(BilevelSettings.of(problem), problem, load_corpus())
    loop.run()
    found = times(judged(loop, compared(loop, loop.phases())))
    seconds = time.process_time() - began
    run = MethodRun(BILEVEL, name, seed, found[SCHEDULE], seconds, 0)
    return run.against(found[REFERENCE])


def report(runs: Sequence[MethodRun], options: AblateOptions) -> Report:
    """Return a line for each variant with its gaps on every problem, and the picture."""
    note = (
        f"{'quick, a trial only' if options.quick else f'{options.seeds} seeds'}; {options.jobs} at a time, "
        "one thread each. Gap to the optimum in the model, raw / polished: median over seeds (smallest to "
        "largest)."
    )
    problems = [
        problem for problem in dict.fromkeys(run.problem for run in runs) if problem != BILEVEL
    ]
    lines = []
    for name, variant in VARIANTS.items():
        rows = []
        for problem in problems:
            rows.append([run for run in runs if (run.problem, run.method) == (problem, name)])
        if any(rows):
            cells = [_cell(own, runs, variant) if own else "-" for own in rows]
            lines.append((name, variant.question, *cells))
    caption = "gap of every run of every variant to the optimum"
    files = {"curves.csv": curves_csv(runs)}
    if not lines:
        return Report(note, "", bilevel_lines(runs), files=files)
    table = markdown_table(("variant", "question", *problems), lines, (0, 1))
    pictures = {"ablate.png": (figure(runs, problems), caption)}
    return Report(note, table, bilevel_lines(runs), pictures=pictures, files=files)


def _cell(own: Sequence[MethodRun], runs: Sequence[MethodRun], variant: Variant) -> str:
    """Write the gaps of one variant on one problem."""
    if variant.question == EQUAL_TIME:
        return _spread(gaps_at_equal_seconds(own, runs))
    seconds = quantile([run.seconds for run in own], 50)
    raw = _spread([gap for run in own if (gap := run.raw_gap) is not None])
    return f"{raw} / {_spread([run.gap for run in own])} in {seconds:.1f} s"


def gaps_at_equal_seconds(own: Sequence[MethodRun], runs: Sequence[MethodRun]) -> list[float]:
    """Read every curve at the default's median seconds on the same problem; at its end without a default."""
    times = [run.seconds for run in runs if (run.problem, run.method) == (own[0].problem, DEFAULT)]
    end = quantile(times, 50) if times else float("inf")
    gaps = []
    for run in own:
        if run.gap < float("inf"):
            slower = read_curve(run.curve, end) / run.iteration_time_s
            gaps.append((1.0 + run.gap) * slower - 1.0)
        else:
            gaps.append(run.gap)
    return gaps


def _spread(gaps: Sequence[float]) -> str:
    """Return median, and smallest to largest."""
    low, middle, high = (percent(value) for value in (min(gaps), quantile(gaps, 50), max(gaps)))
    return middle if low == high else f"{middle} ({low} to {high})"


def bilevel_lines(runs: Sequence[MethodRun]) -> list[str]:
    """Compare first and second order, in a sentence each."""
    lines = []
    for name in ORDERS:
        mine = [run for run in runs if run.method == name]
        if mine:
            ratios = [1.0 + run.gap for run in mine]
            seconds = quantile([run.seconds for run in mine], 50)
            lines.append(
                f"- {name}: predicted time to the target loss {quantile(ratios, 50):.3f} times the "
                f"all-16-bit plan's ({min(ratios):.3f} to {max(ratios):.3f}); {seconds:.0f} CPU seconds."
            )
    return lines


def figure(runs: Sequence[MethodRun], problems: Sequence[str]) -> Figure:
    """Draw every run of every variant, raw and polished, one panel for each problem."""
    variants = [name for name in VARIANTS if any(run.method == name for run in runs)]
    picture = Figure(
        figsize=(3.2 * len(problems) + 1.5, 0.32 * len(variants) + 1.6), layout="constrained"
    )
    for axes, problem in zip(
        picture.subplots(1, len(problems), sharey=True, squeeze=False)[0], problems, strict=True
    ):
        mine = [run for run in runs if run.problem == problem]
        for label, colour, shift in (("raw", "#e1973c", 0.15), ("polished", "#4878a8", -0.15)):
            gaps = [
                run.gap if label == "polished" or run.raw_gap is None else run.raw_gap
                for run in mine
            ]
            y = [variants.index(run.method) + shift for run in mine]
            axes.scatter(
                [100.0 * min(max(gap, 0.0), 10.0) for gap in gaps], y, s=12, c=colour, label=label
            )
        axes.set_xscale("symlog", linthresh=1e-3)
        axes.set_title(PROBLEMS[problem], fontsize=8, loc="left")
        axes.set_xlabel("gap to the optimum, %", fontsize=8)
        axes.grid(axis="x", color="#e4e4e4", linewidth=0.6)
    axes.set_yticks(range(len(variants)), variants, fontsize=8)
    axes.invert_yaxis()
    axes.legend(fontsize=7)
    return picture


def run(options: AblateOptions) -> int:
    """Run all variants; returns the exit status."""
    plain = [name for name in options.variants if name in VARIANTS]
    tasks = {
        f"{BILEVEL}, {name}": (BILEVEL, name, 0.0) for name in options.variants if name in ORDERS
    }
    for problem in options.problems if plain else ():
        optimum = find_layerwise_plan(suite([PROBLEMS[problem]])[0].tables(), "layerwise").cost
        tasks |= {f"{problem}, {name}": (problem, name, optimum) for name in plain}
    limits = "other problems, and more than a quarter of the search's own steps."
    study = Study(
        "ablate",
        "What matters in the search?",
        limits,
        partial(run_variant, options=options),
        partial(report, options=options),
    )
    return run_study(study, tasks, options)


if __name__ == "__main__":
    raise SystemExit(run_main("experiments.ablate", __doc__, AblateOptions, run))
