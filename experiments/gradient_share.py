"""Measure what the gradient is worth: the same search with noise for gradients, and with frozen logits.

python -m experiments.gradient_share           23 problems with and 4 without a proof; 3 seeds
python -m experiments.gradient_share problems=[t5] seeds=1

The controls take as many steps as the descent, and polish as it does. The rivals get its CPU seconds.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf, isfinite

from baselines import PLANNERS
from darts_parallel.config import SearchConfig, ranged, read_yaml, run_main
from darts_parallel.cost import Tables, build_tables, evaluate_batch
from darts_parallel.exact import find_layerwise_plan
from darts_parallel.gradient import GradientSearch, search_tables
from darts_parallel.problem import load_problem
from darts_parallel.report import markdown_table
from experiments.comparison.controls import CONTROLS
from experiments.comparison.problems import LIST, named, suite
from experiments.comparison.quantiles import percent, quantile
from experiments.comparison.runs import SPACE, gap
from experiments.study import Study, StudyOptions, report_text, run_study

STAGES = ("relaxed", "repaired", "fitted", "polished")
CLOSED = (", tight", ", uneven", "t5_1_3b on a10_8x4, loose")
"""Parts of the names of closed-form problems: little memory, or layers that all differ."""
LARGEST = 64
"""GPUs of the largest problem that takes part."""
UNPROVEN: dict[str, list[str]] = read_yaml(LIST)["unproven"]
"""Problems without a proof, by name: cost terms that no exact method knows, continuous shares, orders."""
SEARCH = SearchConfig(max_seconds=600.0)
FREE_SEARCH = replace(SEARCH, num_steps=30, num_restarts=8, order_passes=20_000_000)
"""Settings where the schedule is free: every step simulates, and orders would be searched for minutes."""
PROXIES = (1.0, 1.5, 2.0, 3.0)
"""Factors on messages and resharding of the tables that the exact method solves instead."""
PROXY = "exact on proxies"
RIVALS = ("annealing", "random_search")
NO_DESCENT = "no descent"
COLUMNS = (*STAGES, "at best", "largest", "CPU s")
"""Median gaps by stage; how many polished plans are the best known one, and the largest gap of them."""
TIE = 1e-6
"""Relative difference below which two runs are equal."""


class FrozenLogits(GradientSearch):
    """Take all steps, but move nothing."""

    def move(self) -> None:
        """Leave all parameters where they began."""


LOOPS: dict[str, type[GradientSearch]] = {
    "descent": GradientSearch,
    "noise": CONTROLS["no_gradient"],
    "frozen": FrozenLogits,
}
"""Searches by variant."""


@dataclass
class ShareOptions(StudyOptions):
    """Command line of `python -m experiments.gradient_share`."""

    problems: list[str] = field(default_factory=list)
    """Parts of problem names; none: all."""
    seeds: int = ranged(3)
    """Seeds 0 to `seeds` - 1."""


@dataclass(frozen=True)
class StageRow:
    """Hold the stages of one run: seconds per iteration, infinite where the plan does not fit."""

    problem: str
    variant: str
    seed: int
    cpu_s: float
    optimum: float
    """Proven by dynamic programming; infinite if nothing is proven."""
    relaxed: float = inf
    repaired: float = inf
    fitted: float = inf
    polished: float = inf


def problems(parts: Sequence[str]) -> dict[str, Callable[[], Tables]]:
    """Return the tables' makers of all problems whose name contains one of `parts`, by name."""
    found: dict[str, Callable[[], Tables]] = {}
    for case in named(suite(), CLOSED):
        if case.problem.cluster.num_devices <= LARGEST:
            found[case.name] = case.tables
    for name, words in UNPROVEN.items():
        found[name] = partial(_own_tables, words)
    return {name: make for name, make in found.items() if any(p in name for p in parts or [""])}


def _own_tables(words: list[str]) -> Tables:
    return build_tables(load_problem(words))


def solve(task: tuple[str, int]) -> list[StageRow]:
    """Run every variant on one problem with one seed."""
    name, seed = task
    tables = problems([name])[name]()
    own = any(table.own for table in tables)
    unproven = name in UNPROVEN
    settings = FREE_SEARCH if any(table.pipeline.free for table in tables) else SEARCH
    optimum = inf if unproven else find_layerwise_plan(tables, SPACE).cost
    rows = []
    for variant, loop in LOOPS.items():
        began = time.process_time()
        result = search_tables(tables, SPACE, settings, seed, loop=loop)
        cpu_s = time.process_time() - began
        fitting = [stage for stage in result.stages if stage.fits] if result else []
        stages = {stage.name: stage.iteration_time_s for stage in fitting}
        rows.append(StageRow(name, variant, seed, cpu_s, optimum, **stages))
    seconds = rows[0].cpu_s
    solvers = {NO_DESCENT: partial(_polished, tables, replace(settings, max_seconds=seconds), seed)}
    for rival in RIVALS:
        solvers[rival] = partial(_of_rival, rival, tables, seconds, seed)
    if own:
        solvers[PROXY] = partial(_on_proxies, tables)
    for variant, found in solvers.items():
        began = time.process_time()
        best = found()
        cpu_s = time.process_time() - began
        rows.append(StageRow(name, variant, seed, cpu_s, optimum, polished=best))
    return rows


def _of_rival(name: str, tables: Tables, seconds: float, seed: int) -> float:
    """Return what a rival finds in so many seconds."""
    return PLANNERS[name](tables, deadline=time.monotonic() + seconds, seed=seed).cost


def _polished(tables: Tables, config: SearchConfig, seed: int) -> float:
    """Return what polishing and random kicks find, without a step of descent."""
    found = search_tables(tables, SPACE, config, seed, loop=CONTROLS["no_descent"])
    return found.iteration_time_s if found else inf


def _on_proxies(tables: Tables) -> float:
    """Return the least true seconds of plans that are optimal without the term, with longer messages."""
    seconds = [inf]
    for factor in PROXIES:
        proxies = []
        for table in tables:
            plain = replace(table, own=None)
            proxies.append(replace(plain, reshard=factor * table.reshard, p2p=factor * table.p2p))
        best = find_layerwise_plan(proxies, SPACE).best
        if best is not None:
            cost = evaluate_batch(tables[best.table], best.plan)
            seconds.append(float(cost.iteration_time[0]))
    return min(seconds)


def report(rows: Sequence[StageRow]) -> str:
    """Return medians by stage and variant, wins and losses, and the rows of unproven problems."""
    closed = [row for row in rows if isfinite(row.optimum)]
    own = [row for row in rows if not isfinite(row.optimum)]
    parts = []
    if closed:
        fits = [f"{name} {_fitting(closed, name)}" for name in LOOPS]
        lines = [(name, *_cells(closed, name)) for name in (*LOOPS, NO_DESCENT, *RIVALS)]
        parts += [
            "Median gap to the proven optimum, by stage of the plan. A plan that does not fit counts "
            f"as infinitely slow. The relaxed plan fits in: {', '.join(fits)} runs.",
            markdown_table(("variant", *COLUMNS), lines),
            [_against(closed, other) for other in LOOPS if other != "descent"],
        ]
    if own:
        parts += [
            "Problems without a proof: median gap to the best plan of all methods and seeds.",
            _own_table(own),
        ]
    return report_text(*parts)


def _fitting(rows: Sequence[StageRow], variant: str) -> str:
    relaxed = [row.relaxed for row in rows if row.variant == variant]
    return f"{sum(map(isfinite, relaxed))} of {len(relaxed)}"


def _cells(rows: Sequence[StageRow], variant: str) -> list[str]:
    """Return a variant's median gaps by stage, its polished gaps, and its median seconds."""
    mine = [row for row in rows if row.variant == variant]
    stages = STAGES if variant in LOOPS else STAGES[-1:]
    cells = ["-"] * (len(STAGES) - len(stages))
    for stage in stages:
        gaps = [gap(getattr(row, stage), row.optimum) for row in mine]
        cells.append(percent(quantile(gaps, 50)))
    # the polished ones: the last stage
    ties = f"{sum(own < TIE for own in gaps)} of {len(gaps)}"
    seconds = f"{quantile([row.cpu_s for row in mine], 50):.1f}"
    return [*cells, ties, percent(max(gaps)), seconds]


def _against(rows: Sequence[StageRow], other: str) -> str:
    """Count runs in which descent is better and worse than a control, by stage."""
    counts = []
    for stage in STAGES[1:]:
        own = _seconds(rows, "descent", stage)
        control = _seconds(rows, other, stage)
        runs = list(zip(own, control, strict=True))
        better = sum(mine < its * (1.0 - TIE) for mine, its in runs)
        worse = sum(its < mine * (1.0 - TIE) for mine, its in runs)
        counts.append(f"{stage}: better in {better}, worse in {worse} of {len(own)} runs")
    return f"- Descent against {other}, {'; '.join(counts)}."


def _seconds(rows: Sequence[StageRow], variant: str, stage: str) -> list[float]:
    """Return the seconds of a stage, whose problems and seeds are in one order for all variants."""
    return [getattr(row, stage) for row in rows if row.variant == variant]


def _own_table(rows: Sequence[StageRow]) -> list[str]:
    """Return the gaps to the best plan of all methods on problems without a proof."""
    lines = []
    for problem in dict.fromkeys(row.problem for row in rows):
        mine = [row for row in rows if row.problem == problem]
        best = min(row.polished for row in mine)
        known = [replace(row, optimum=best) for row in mine]
        variants = dict.fromkeys(row.variant for row in mine)
        lines += [(problem, variant, *_cells(known, variant)) for variant in variants]
    return markdown_table(("problem", "variant", *COLUMNS), lines, left=(0, 1))


def run(options: ShareOptions) -> int:
    """Run all variants on all problems; returns the exit status."""
    study = Study(
        "gradient_share",
        "What is the gradient worth?",
        "problems above 64 GPUs.",
        solve,
        report,
    )
    tasks = {}
    for name in problems(options.problems):
        for seed in range(options.seeds):
            tasks[f"{name}, seed {seed}"] = (name, seed)
    return run_study(study, tasks, options)


if __name__ == "__main__":
    raise SystemExit(run_main("experiments.gradient_share", __doc__, ShareOptions, run))
