"""Which method finds the best plan where the schedule is free? Twelve problems, equal seconds.

    python -m experiments.compare problems=schedules             5 seeds, 20 s a run
    python -m experiments.compare_schedules seeds=1 budget=4     a first look

Every run of every method has the same seconds. Prints a table; leaves schedules.csv, schedules.md and the
anytime curves in `out`. Ctrl-C keeps what is done.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path

from darts_parallel.config.checks import require_at_least
from darts_parallel.config.composition import load_config
from darts_parallel.config.options import run_main
from darts_parallel.config.search import SearchConfig
from darts_parallel.errors import ConfigError
from darts_parallel.plan.file import write_json, write_text
from experiments.comparison.schedule_problems import CASES
from experiments.comparison.schedule_suite import Solved, answers_csv, gaps_table, solve_case
from experiments.results_page import publish as publish_page


@dataclass
class ScheduleComparison:
    """What to compare."""

    problems: list[str] = field(default_factory=list)
    """Parts of problem names; none: all twelve."""
    seeds: int = 5
    budget: float = 20.0
    """Seconds of every run."""
    search: SearchConfig = field(default_factory=lambda: load_config().search)
    """Settings of the gradient search, from conf/; `budget` takes the place of its time limit."""
    out: str = "outputs/compare_schedules"
    publish: bool = False
    """Write experiments/results/compare_schedules.md, too."""

    def __post_init__(self) -> None:
        require_at_least("seeds", self.seeds, 1)
        require_at_least("budget", self.budget, 0, strict=True)


def run(options: ScheduleComparison) -> int:
    """Run all problems and write what came out; returns the exit status."""
    wanted = [case for case in CASES if any(part in case.name for part in options.problems or [""])]
    if not wanted:
        raise ConfigError(
            f"problems={','.join(options.problems)} is part of no problem's name; "
            f"nearest legal: {CASES[0].name}."
        )
    seeds = range(options.search.seed, options.search.seed + options.seeds)
    solved: list[Solved] = []
    interrupted = False
    try:
        for case in wanted:
            solved.append(solve_case(case, seeds, options.budget, options.search))
            print(f"{case.name}: best {solved[-1].best:.4g} s", flush=True)
            _write(options, solved)
    except KeyboardInterrupt:
        interrupted = True
    if solved:
        _report(options, solved)
    return 130 if interrupted else 0


def _text(options: ScheduleComparison, solved: list[Solved]) -> str:
    note = f"{options.seeds} seeds, {options.budget:g} s for every run; gaps are medians over seeds to the "
    return note + "best plan of all methods.\n\n" + gaps_table(solved)


def _write(options: ScheduleComparison, solved: list[Solved]) -> None:
    """What is done so far."""
    out, text = Path(options.out), _text(options, solved)
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


def _report(options: ScheduleComparison, solved: list[Solved]) -> None:
    """Print everything, and publish it where asked."""
    text = _text(options, solved)
    print(text + f"\n{options.out}/schedules.csv, schedules.md, curves.json")
    if options.publish:
        command = f"python -m experiments.compare_schedules {' '.join(sys.argv[1:])}".strip()
        publish_page(
            "compare_schedules", "Which method finds the best plan where the schedule is free?", command, text
        )


if __name__ == "__main__":
    raise SystemExit(run_main("experiments.compare_schedules", __doc__, ScheduleComparison, run))
