"""Which method finds the best plan where the schedule is free? Fourteen problems, equal seconds.

    python -m experiments.compare_schedules                      5 seeds, 4 s a run: half an hour of one core
    python -m experiments.compare_schedules seeds=1 budget=2     a first look

Every run of every method has the same seconds: what a method found later does not count. Tables of costs are
made before and shared. Then the best order of passes for fixed stages, by an integer programme, on small
cases. Prints a table; leaves schedules.csv, schedules.md, curves.json and curves.png in `out`. Ctrl-C keeps
what is done.
"""

import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from darts_parallel.config.checks import require_at_least
from darts_parallel.config.composition import load_config
from darts_parallel.config.options import run_main
from darts_parallel.config.search import SearchConfig
from darts_parallel.errors import ConfigError
from darts_parallel.plan.file import write_json, write_text
from experiments.comparison.picture import save
from experiments.comparison.schedule_figure import curves_figure
from experiments.comparison.schedule_orders import SMALL, OrderGap, order_gaps, orders_table
from experiments.comparison.schedule_problems import CASES
from experiments.comparison.schedule_suite import Solved, answers_csv, gaps_table, solve_case
from experiments.results_page import publish as publish_page

SHORT: dict[str, Any] = {"num_steps": 30, "num_restarts": 8, "polish_starts": 4}
"""A whole annealing within a few seconds."""


@dataclass
class ScheduleComparison:
    """What to compare."""

    problems: list[str] = field(default_factory=list)
    """Parts of problem names; none: all of them."""
    seeds: int = 5
    budget: float = 4.0
    """Seconds of every run."""
    search: SearchConfig = field(default_factory=lambda: replace(load_config().search, **SHORT))
    """Settings of the gradient search: those of conf/ but for few steps; `budget` takes the place of its
    time limit."""
    order_seconds: float = 15.0
    """Seconds for the best order of the passes of one schedule of a small case; 0: leave it out."""
    out: str = "outputs/compare_schedules"
    publish: bool = False
    """Write experiments/results/compare_schedules.md, too."""

    def __post_init__(self) -> None:
        require_at_least("seeds", self.seeds, 1)
        require_at_least("budget", self.budget, 0, strict=True)
        require_at_least("order_seconds", self.order_seconds, 0)


def run(options: ScheduleComparison) -> int:
    """Run all problems and write what came out; returns the exit status."""
    wanted = [case for case in CASES if any(part in case.name for part in options.problems or [""])]
    if not wanted:
        raise ConfigError(
            f"problems={','.join(options.problems)} is part of no problem's name; try {CASES[0].name}."
        )
    seeds = range(options.search.seed, options.search.seed + options.seeds)
    solved: list[Solved] = []
    orders: list[OrderGap] = []
    interrupted = False
    try:
        for case in wanted:
            solved.append(solve_case(case, seeds, options.budget, options.search))
            print(f"{case.name}: best {solved[-1].best:.4g} s", flush=True)
            _write(options, solved, orders)
        for small in SMALL if options.order_seconds and not options.problems else ():
            orders += order_gaps(small, options.order_seconds)
    except KeyboardInterrupt:
        interrupted = True
    if solved:
        _write(options, solved, orders)
        _report(options, solved, orders)
    return 130 if interrupted else 0


def _text(options: ScheduleComparison, solved: list[Solved], orders: list[OrderGap]) -> str:
    note = (
        f"{options.seeds} seeds, {options.budget:g} s for every run (what was found later does not count); "
        "gaps are medians over seeds to the best plan of all methods. No plan of any of the schedules is "
        "faster than the proven bound (`darts_parallel.exact.schedule_bounds`, as many seconds), so the best "
        "plan is within the last column of the fastest one. `megatron_default`: equal blocks, "
        "embedding and loss counted as blocks, or a shorter last stage; `published_layout`: NVIDIA's cut.\n\n"
    )
    text = note + gaps_table(solved)
    if orders:
        text += (
            "\nThe best order of passes for fixed stages (balanced chunks), within the memory of the "
            f"schedule's own order; the solver stops after {options.order_seconds:g} s. It may split a "
            "backward that the rule does not.\n\n" + orders_table(orders)
        )
    return text


def _write(options: ScheduleComparison, solved: list[Solved], orders: list[OrderGap]) -> None:
    """What is done so far."""
    out, text = Path(options.out), _text(options, solved, orders)
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / "schedules.csv", answers_csv(solved))
    write_text(out / "schedules.md", text)
    curves = [
        {
            "problem": a.problem,
            "method": a.method,
            "seed": a.seed,
            "curve": [list(point) for point in a.curve],
        }
        for entry in solved
        for a in entry.answers
    ]
    write_json(out / "curves.json", {"curves": curves})


def _report(options: ScheduleComparison, solved: list[Solved], orders: list[OrderGap]) -> None:
    """Print everything, draw the curves, and publish both where asked."""
    text, picture = _text(options, solved, orders), Path(options.out) / "curves.png"
    save(curves_figure(solved, options.budget), picture)
    print(text + f"\n{options.out}/schedules.csv, schedules.md, curves.json, curves.png")
    if options.publish:
        command = f"python -m experiments.compare_schedules {' '.join(sys.argv[1:])}".strip()
        publish_page(
            "compare_schedules", "Which method finds the best plan where the schedule is free?", command,
            text, {picture: "median over seeds of the gap to the best plan of all methods"},
        )  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(run_main("experiments.compare_schedules", __doc__, ScheduleComparison, run))
