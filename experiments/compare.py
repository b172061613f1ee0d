"""Which method finds the best plan? The gradient search, raw and polished, exact methods and rivals.

python -m experiments.compare                            # the whole suite, 5 seeds
python -m experiments.compare problems=core              # a third of it, every kind of problem
python -m experiments.compare problems=[toy] seeds=1     # a first try, seconds
python -m experiments.compare problems=[gpt2_xl,tight] seeds=2 search.num_steps=100
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from baselines import PLANNERS
from darts_parallel.config import SearchConfig, load_config, require_at_least, require_members, run_main
from darts_parallel.report import markdown_table
from experiments.comparison.curves import curves_csv, curves_figure
from experiments.comparison.findings import distribution, problem_table, remarks
from experiments.comparison.problems import suite
from experiments.comparison.runs import AUTO, SEARCH, UNIFORM, CompareWork, MethodRun, run_case
from experiments.comparison.standings import HEADER, default_verdict, duels, standings
from experiments.study import Report, Study, StudyOptions, run_study

METHODS = (AUTO, SEARCH, UNIFORM, *PLANNERS)


@dataclass
class CompareOptions(StudyOptions):
    """Command line of `python -m experiments.compare`."""

    problems: list[str] = field(default_factory=list)
    """Parts of problem names; none: the whole suite; `core`: a third of it."""
    seeds: int = 5
    """Searches of each problem, with seeds from `search.seed` on."""
    methods: list[str] = field(default_factory=lambda: list(METHODS))
    """Methods next to the oracle, which always runs."""
    search: SearchConfig = field(default_factory=lambda: load_config().search)
    """Settings of the search, from conf/."""
    oracle_seconds: float = 60.0
    """Seconds after which the oracle stops with a lower bound, and a rival that ends by itself is stopped."""
    budget: float = 10.0
    """Seconds of the gradient search at most; a rival that never ends by itself gets as many as that took."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least("seeds", self.seeds, 1)
        require_at_least("budget", self.budget, 0, strict=True)
        require_at_least("oracle_seconds", self.oracle_seconds, 0, strict=True)
        require_members("methods", self.methods, METHODS)


def report(runs: Sequence[MethodRun], options: CompareOptions) -> Report:
    """Return the standings, the distribution of gaps and a line for each problem."""
    standard = vars(load_config().search)
    changed = [
        f"search.{key}={value}" for key, value in vars(options.search).items() if value != standard[key]
    ]
    note = (
        f"{options.seeds} seeds, at most {options.budget:g} s for the gradient search and as long as it took "
        f"for each random rival; {options.jobs} problems at a time, one thread each. Gaps are medians over "
        f"seeds to the best known plan. {' '.join(changed)}"
    ).rstrip()
    caption = "best plan so far against wall-clock, median over seeds of the gap to the best known plan"
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
    first = options.search.seed
    seeds = tuple(range(first, first + options.seeds))
    tasks = {
        case.name: CompareWork(case, tuple(options.methods), seeds, options.search, options.oracle_seconds,
                        options.budget)
        for case in suite(options.problems)
    }  # fmt: skip
    study = Study(
        "compare",
        "Which method finds the best plan?",
        "measured seconds; all methods read the same cost tables.",
        run_case,
        partial(report, options=options),
        page="compare" if options.problems else "compare_whole",
    )
    return run_study(study, tasks, options)


if __name__ == "__main__":
    raise SystemExit(run_main("experiments.compare", __doc__, CompareOptions, run))
