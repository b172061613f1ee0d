"""Which method finds the best plan where the schedule is free? Fourteen problems, equal seconds.

    python -m experiments.compare_schedules                      # 5 seeds, 4 s a run
    python -m experiments.compare_schedules seeds=1 budget=2     # a first look

Every run of every method has the same seconds: what a method found later does not count. Tables of costs are
made before and shared.
"""

from collections.abc import Sequence
from functools import partial

from darts_parallel.config import run_main
from experiments.comparison.controls import CONTROLS
from experiments.comparison.findings import contradictions, control_line, gaps_table, verdict
from experiments.comparison.problems import named, schedule_suite
from experiments.comparison.runs import SEARCH, MethodRun
from experiments.comparison.schedules import METHODS, CompareSchedulesOptions, solve_case
from experiments.study import Report, Study, run_study


def report(runs: Sequence[MethodRun], options: CompareSchedulesOptions) -> Report:
    """Return the table of gaps, and what follows."""
    note = (
        f"{options.seeds} seeds, {options.budget:g} s for every run (what was found later does not count), "
        f"{options.jobs} problems at a time; gaps are medians over seeds to the best plan of all methods. No "
        "plan is faster than the proven bound in any order of passes on these placements of stages "
        "(`simulated_lower_bound`), so the best plan is within the last column of the fastest one. "
        "`rules_only`: the same search, where orders are those of the listed rules; `heuristic_order`: the "
        "zero-bubble paper's at the memory of each device (one seed); `blind_moves`: any pass moves, "
        "not those of the longest path. Planners that know no orders have three seeds at most. "
        "`megatron_default`: equal blocks, embedding and loss counted as blocks, or a shorter last stage; "
        "`published_layout`: NVIDIA's. Controls: `no_gradient` takes noise of their size for gradients, "
        "`no_descent` polishes its starts and goes on as the search does: by orders of "
        "passes and moves of layers."
    )
    lines = verdict(runs, SEARCH, [name for name in METHODS if name not in CONTROLS])
    lines += [control_line(runs, control) for control in CONTROLS]
    lines += contradictions(runs)
    return Report(note, gaps_table(runs, METHODS), lines)


def run(options: CompareSchedulesOptions) -> int:
    """Run all problems; returns the exit status."""
    wanted = named(schedule_suite(), options.problems)
    study = Study(
        "compare_schedules",
        "Which method finds the best plan where the schedule is free?",
        "measured seconds, and more of them than a few a run.",
        partial(solve_case, options=options),
        partial(report, options=options),
    )
    return run_study(study, {case.name: case for case in wanted}, options)


if __name__ == "__main__":
    raise SystemExit(
        run_main("experiments.compare_schedules", __doc__, CompareSchedulesOptions, run)
    )
