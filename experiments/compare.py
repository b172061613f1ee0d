"""Which method finds the best plan? The gradient search, raw and polished, exact methods and rivals.

python -m experiments.compare                            # the whole suite, 5 seeds
python -m experiments.compare problems=core              # a third of it, every kind of problem
python -m experiments.compare problems=[toy] seeds=1     # a first try, seconds
python -m experiments.compare problems=[gpt2_xl,tight] seeds=2 search.num_steps=100
"""

from collections.abc import Sequence
from functools import partial

from darts_parallel.config import SearchConfig, load_config, run_main
from experiments.comparison.findings import contradictions, gaps_table, standings, verdict
from experiments.comparison.methods import METHODS, CompareOptions, run_case
from experiments.comparison.problems import suite
from experiments.comparison.runs import AUTO, ORACLE, SEARCH, MethodRun
from experiments.study import Study, report_text, run_study


def changed(search: SearchConfig) -> str:
    """List the settings that differ from those of conf/."""
    standard = vars(load_config().search)
    given = vars(search).items()
    return " ".join(f"search.{key}={value}" for key, value in given if value != standard[key])


def report(runs: Sequence[MethodRun], options: CompareOptions) -> str:
    """Return the standings, the verdicts and a line for each problem."""
    note = (
        f"{options.seeds} seeds, at most {options.budget:g} s for the gradient search and as long "
        f"as it took for each random rival; {options.jobs} problems at a time, one thread each. "
        f"Gaps are medians over seeds to the best known plan. {changed(options.search)}"
    )
    ran = [name for name in (ORACLE, *METHODS) if any(run.method == name for run in runs)]
    rivals = [name for name in ran if name not in (ORACLE, AUTO)]
    verdicts = []
    for method in {AUTO, SEARCH} & set(ran):
        verdicts += verdict(runs, method, rivals)
    tables = (standings(runs, ran), sorted(verdicts), contradictions(runs), gaps_table(runs, ran))
    return report_text(note.rstrip(), *tables)


def run(options: CompareOptions) -> int:
    """Run all problems; returns the exit status."""
    study = Study(
        "compare",
        "Which method finds the best plan?",
        "measured seconds; all methods read the same cost tables.",
        partial(run_case, options=options),
        partial(report, options=options),
    )
    return run_study(study, {case.name: case for case in suite(options.problems)}, options)


if __name__ == "__main__":
    raise SystemExit(run_main("experiments.compare", run))
