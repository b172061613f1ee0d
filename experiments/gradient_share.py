"""Measure what the gradient is worth: the same search with noise for gradients, and with frozen logits.

python -m experiments.gradient_share           23 problems with and 4 without a proof; 3 seeds
python -m experiments.gradient_share problems=[t5] seeds=1

The controls take as many steps as the descent, and polish as it does. The rivals get its CPU seconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf, isfinite

from baselines import PLANNERS, Planner
from baselines._planner import Incumbent
from darts_parallel.config import SearchConfig, ranged, read_yaml, run_main
from darts_parallel.exact import find_layerwise_plan
from darts_parallel.gradient import GradientSearch
from darts_parallel.report import markdown_table
from experiments.comparison.controls import CONTROLS
from experiments.comparison.methods import Contest
from experiments.comparison.problems import LIST, SuiteCase, named, suite
from experiments.comparison.quantiles import percent, quantile
from experiments.comparison.runs import (
    ORACLE,
    SPACE,
    STAGES,
    MethodRun,
    best_known,
    gap,
    grouped,
    median_of,
)
from experiments.study import Study, StudyOptions, report_text, run_study

CLOSED = (", tight", ", uneven", "t5_1_3b on a10_8x4, loose")
"""Parts of the names of closed-form problems: little memory, or layers that all differ."""
LARGEST = 64
"""GPUs of the largest problem that takes part."""
UNPROVEN = "unproven"
"""Variant of problems without a proof: cost terms that no exact method knows, continuous shares, orders."""
SEARCH = SearchConfig(max_seconds=600.0)
FREE_SEARCH = replace(SEARCH, num_steps=30, num_restarts=8, order_passes=20_000_000)
"""Settings where the schedule is free: every step simulates, and orders would be searched for minutes."""
FACTORS = (1.0, 1.5, 2.0, 3.0)
"""Factors on messages and resharding of the tables that the exact method solves instead."""
RIVALS = ("annealing", "random_search")
DESCENT = "descent"
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
    DESCENT: GradientSearch,
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


def problems(parts: Sequence[str]) -> list[SuiteCase]:
    """Return all problems whose name contains one of `parts`.

    Errors:
        ConfigError: one of the parts fits no problem.
    """
    closed = named(suite(), CLOSED)
    found = [case for case in closed if case.problem.cluster.num_devices <= LARGEST]
    for name, words in read_yaml(LIST)[UNPROVEN].items():
        found.append(SuiteCase(name, tuple(words), UNPROVEN))
    return named(found, parts)


def offer_proxies(incumbent: Incumbent) -> None:
    """Offer the plans that are optimal without the term, with longer messages."""
    for factor in FACTORS:
        proxies = []
        for table in incumbent.tables:
            plain = replace(table, own=None)
            proxies.append(replace(plain, reshard=factor * table.reshard, p2p=factor * table.p2p))
        best = find_layerwise_plan(proxies, SPACE).best
        if best is not None:
            incumbent.offer(best.table, best.plan)


PROXIES = Planner("exact on proxies", offer_proxies, keep_all=True)


def solve(task: tuple[SuiteCase, int]) -> list[MethodRun]:
    """Run every variant on one problem with one seed, the exact method first where it knows the problem."""
    case, seed = task
    contest = Contest(case.name, case.tables())
    tables = contest.tables
    settings = FREE_SEARCH if any(table.pipeline.free for table in tables) else SEARCH
    if case.variant != UNPROVEN:
        contest.plan(ORACLE, partial(find_layerwise_plan, space_kind=SPACE), inf)
    for variant, loop in LOOPS.items():
        contest.search(settings, seed, variant, loop)
    (descent,) = grouped(contest.runs, "method")[DESCENT]
    seconds = descent.cpu_s
    limited = replace(settings, max_seconds=seconds)
    contest.search(limited, seed, NO_DESCENT, CONTROLS["no_descent"])
    for rival in RIVALS:
        contest.plan(rival, PLANNERS[rival], seconds, seed=seed)
    if any(table.own for table in tables):
        contest.plan(PROXIES.name, PROXIES, inf)
    return contest.runs


def report(rows: Sequence[MethodRun]) -> str:
    """Return medians by stage and variant, wins and losses, and the rows of unproven problems."""
    proven = {row.problem for row in rows if row.method == ORACLE}
    closed = [row for row in rows if row.problem in proven]
    others = [row for row in rows if row.problem not in proven]
    parts = []
    if closed:
        fits = [f"{name} {_fitting(closed, name)}" for name in LOOPS]
        lines = [(name, *_cells(closed, name)) for name in (*LOOPS, NO_DESCENT, *RIVALS)]
        parts += [
            "Median gap to the proven optimum, by stage of the plan. A plan that does not fit counts "
            f"as infinitely slow. The relaxed plan fits in: {', '.join(fits)} runs.",
            markdown_table(("variant", *COLUMNS), lines),
            [_against(closed, other) for other in LOOPS if other != DESCENT],
        ]
    if others:
        parts += [
            "Problems without a proof: median gap to the best plan of all methods and seeds.",
            _unproven_table(others),
        ]
    return report_text(*parts)


def _fitting(rows: Sequence[MethodRun], variant: str) -> str:
    relaxed = _seconds(rows, variant, "relaxed")
    return f"{sum(map(isfinite, relaxed))} of {len(relaxed)}"


def _cells(rows: Sequence[MethodRun], variant: str) -> list[str]:
    """Return a variant's median gaps by stage, its polished gaps, and its median seconds."""
    mine = grouped(rows, "method")[variant]
    best = best_known(rows)
    stages = [*STAGES] if variant in LOOPS else [*STAGES][-1:]
    cells = ["-"] * (len(STAGES) - len(stages))
    for stage in stages:
        times = zip(mine, _seconds(rows, variant, stage), strict=True)
        gaps = [gap(seconds, best[row.problem]) for row, seconds in times]
        cells.append(percent(quantile(gaps, 50)))
    # the polished ones: the last stage
    ties = f"{sum(own < TIE for own in gaps)} of {len(gaps)}"
    return [*cells, ties, percent(max(gaps)), f"{median_of(mine, 'cpu_s'):.1f}"]


def _against(rows: Sequence[MethodRun], other: str) -> str:
    """Count runs in which descent is better and worse than a control, by stage."""
    counts = []
    for stage in [*STAGES][1:]:
        own = _seconds(rows, DESCENT, stage)
        control = _seconds(rows, other, stage)
        runs = list(zip(own, control, strict=True))
        better = sum(mine < its * (1.0 - TIE) for mine, its in runs)
        worse = sum(its < mine * (1.0 - TIE) for mine, its in runs)
        counts.append(f"{stage}: better in {better}, worse in {worse} of {len(own)} runs")
    return f"- Descent against {other}, {'; '.join(counts)}."


def _seconds(rows: Sequence[MethodRun], variant: str, stage: str) -> list[float]:
    """Return the seconds of a stage, whose problems and seeds are in one order for all variants."""
    return [getattr(row, STAGES[stage]) for row in rows if row.method == variant]


def _unproven_table(rows: Sequence[MethodRun]) -> list[str]:
    """Return the gaps to the best plan of all methods on problems without a proof."""
    lines = []
    for problem, mine in grouped(rows, "problem").items():
        for variant in grouped(mine, "method"):
            lines.append((problem, variant, *_cells(mine, variant)))
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
    for case in problems(options.problems):
        for seed in range(options.seeds):
            tasks[f"{case.name}, seed {seed}"] = (case, seed)
    return run_study(study, tasks, options)


if __name__ == "__main__":
    raise SystemExit(run_main("experiments.gradient_share", run))
