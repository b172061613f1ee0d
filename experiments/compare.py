"""Which method finds the best plan? The gradient search, raw and polished, exact methods and rivals.

python -m experiments.compare                            # the whole suite, 5 seeds
python -m experiments.compare problems=core              # a third of it, every kind of problem
python -m experiments.compare problems=[toy] seeds=1     # a first try, seconds
python -m experiments.compare problems=[gpt2_xl,tight] seeds=2 search.num_steps=100
"""

from collections.abc import Sequence
from functools import partial

from darts_parallel.config import load_config, run_main
from darts_parallel.report import markdown_table
from experiments.comparison.curves import curves_csv, curves_figure
from experiments.comparison.findings import distribution, problem_table, remarks
from experiments.comparison.problems import suite
from experiments.comparison.runs import CompareOptions, MethodRun, run_case
from experiments.comparison.standings import HEADER, default_verdict, duels, standings
from experiments.study import Report, Study, run_study


def report(runs: Sequence[MethodRun], options: CompareOptions) -> Report:
    """Return the standings, the distribution of gaps and a line for each problem."""
    standard = vars(load_config().search)
    changed = [
        f"search.{key}={value}"
        for key, value in vars(options.search).items()
        if value != standard[key]
    ]
    note = (
        f"{options.seeds} seeds, at most {options.budget:g} s for the gradient search and as long as it took "
        f"for each random rival; {options.jobs} problems at a time, one thread each. Gaps are medians over "
        f"seeds to the best known plan. {' '.join(changed)}"
    ).rstrip()
    caption = (
        "best plan so far against wall-clock, median over seeds of the gap to the best known plan"
    )
    return Report(
        note,
        markdown_table(HEADER, [standing.cells() for standing in standings(runs)]),
        [*default_verdict(runs), *duels(runs)],
        distribution(runs),
        remarks(runs),
        problem_table(runs),
        pictures={"anytime.png": (curves_figure(runs), caption)},
        files={"curves.csv": curves_csv(runs)},
    )


def run(options: CompareOptions) -> int:
    """Run all problems; returns the exit status."""
    study = Study(
        "compare",
        "Which method finds the best plan?",
        "measured seconds; all methods read the same cost tables.",
        partial(run_case, options=options),
        partial(report, options=options),
        page="compare" if options.problems else "compare_whole",
    )
    return run_study(study, {case.name: case for case in suite(options.problems)}, options)


if __name__ == "__main__":
    raise SystemExit(run_main("experiments.compare", __doc__, CompareOptions, run))
