"""Every method on every problem: the gradient search, raw and polished, exact baselines and rivals.

    python -m experiments.compare                            the whole suite, 5 seeds
    python -m experiments.compare problems=core              a third of it, every kind of problem
    python -m experiments.compare problems=[toy] seeds=1     a first try, seconds
    python -m experiments.compare problems=[gpt2_xl,tight] seeds=2 search.num_steps=100

Prints tables; leaves compare.csv, curves.csv, summary.md, gaps.png and anytime.png in `out`. Ctrl-C keeps
what is done.
"""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from baselines import PLANNERS
from darts_parallel.config.checks import MAX_PROCESSES, require_at_least, require_members, require_size
from darts_parallel.config.composition import load_config
from darts_parallel.config.interrupts import children_without_interrupts, end_with_parent
from darts_parallel.config.options import run_main
from darts_parallel.config.search import SearchConfig
from darts_parallel.report.tables import filled_table, markdown_table
from experiments import compare_schedules
from experiments.compare_schedules import ScheduleComparison
from experiments.comparison.anytime import anytime_figure, write_curves
from experiments.comparison.gaps import Findings, percent
from experiments.comparison.picture import gaps_figure, save
from experiments.comparison.problems import Case, suite
from experiments.comparison.runs import (
    AUTO,
    SEARCH,
    UNIFORM,
    Run,
    Work,
    run_case,
    write_csv,
)
from experiments.comparison.standings import HEADER, default_verdict, duels, standings
from experiments.comparison.summary import markdown, render
from experiments.results_page import console_of, processor, publish, result_folder

METHODS = (AUTO, SEARCH, UNIFORM, *PLANNERS)
FILE_WIDTH = 120
"""Columns of the tables where there is no terminal."""
INTERRUPTED = 130
"""Exit status after Ctrl-C, as the shell has it."""


@dataclass
class CompareOptions:
    """What to compare."""

    problems: list[str] = field(default_factory=list)
    """Parts of problem names; none: the whole suite; `core`: a third of it; `schedules`: fourteen problems
    whose schedule is free, half an hour with `budget=4` (`experiments.compare_schedules`)."""
    seeds: int = 5
    """Searches of each problem, with seeds from `search.seed` on."""
    methods: list[str] = field(default_factory=lambda: list(METHODS))
    """What to hold beside the oracle, which always runs."""
    search: SearchConfig = field(default_factory=lambda: load_config().search)
    """Settings of the search, from conf/."""
    oracle_seconds: float = 60.0
    """An oracle that needs longer stops with a lower bound; a rival that ends by itself is stopped."""
    budget: float = 10.0
    """Most seconds of the gradient search; a rival that never ends by itself gets as many as that took."""
    jobs: int = 2
    """Problems solved at the same time, each in a process of one thread."""
    out: str = "outputs/compare"
    publish: bool = False
    """Write experiments/results/compare.md, too; of the whole suite compare_whole.md."""

    def __post_init__(self) -> None:
        require_at_least("seeds", self.seeds, 1)
        require_size("jobs", self.jobs, MAX_PROCESSES)
        require_at_least("budget", self.budget, 0, strict=True)
        require_at_least("oracle_seconds", self.oracle_seconds, 0, strict=True)
        require_members("methods", self.methods, METHODS)


def compare(options: CompareOptions, console: Console) -> int:
    """Run all problems and write what came out; returns the exit status."""
    if options.problems == ["schedules"]:
        given = ScheduleComparison(
            seeds=options.seeds, budget=options.budget, out=options.out, publish=options.publish
        )
        # settings that nobody changed take as few steps as the short runs there allow
        changed = options.search != CompareOptions().search
        return compare_schedules.run(replace(given, search=options.search) if changed else given)
    cases = suite(options.problems)
    folder = result_folder(options.out)
    write_csv(folder / "compare.csv", [])
    first = options.search.seed
    work = [
        Work(case, tuple(options.methods), tuple(range(first, first + options.seeds)), options.search,
             options.oracle_seconds, options.budget)
        for case in cases
    ]  # fmt: skip
    done: dict[str, list[Run]] = {}
    interrupted = False
    try:
        for name, rows in _solve_all(work, options.jobs, console):
            done[name] = rows
            write_csv(folder / "compare.csv", _in_order(cases, done))
    except KeyboardInterrupt:
        interrupted = True
    finally:
        runs = _in_order(cases, done)
        if runs:
            _write(options, folder, runs, len(cases), console)
    if interrupted:
        console.print(f"interrupted: {len(done)} of {len(cases)} problems are done.", highlight=False)
    return INTERRUPTED if interrupted else 0


def _in_order(cases: Sequence[Case], done: dict[str, list[Run]]) -> list[Run]:
    """Rows in the order of the suite, whichever problem was solved first."""
    return [run for case in cases for run in done.get(case.name, [])]


def _write(options: CompareOptions, folder: Path, runs: list[Run], asked: int, console: Console) -> None:
    """The tables, the summary and the pictures."""
    findings = Findings.of(runs)
    render(findings, console)
    rows, sentences = (
        [standing.cells() for standing in standings(runs)],
        [*default_verdict(runs), *duels(runs)],
    )
    console.print(filled_table("Gap to the best known plan, medians over seeds", HEADER, rows))
    for sentence in sentences:
        console.print(sentence, highlight=False, soft_wrap=True)
    note = _note(options, findings, asked)
    text = markdown(findings, "\n".join([note, "", *markdown_table(HEADER, rows), "", *sentences]))
    write_curves(folder / "curves.csv", runs)
    save(anytime_figure(runs), folder / "anytime.png")
    (folder / "summary.md").write_text(text, encoding="utf-8")
    save(gaps_figure(findings), folder / "gaps.png")
    if options.publish:
        captions = {
            folder / "anytime.png": "best plan so far against wall-clock, every method, 12 problems",
            folder / "gaps.png": "gap of the gradient search to the optimum, raw and polished",
        }
        command = f"python -m experiments.compare {' '.join(sys.argv[1:])}"
        page = "compare" if options.problems else "compare_whole"
        publish(page, "Which method finds the best plan?", command, text, captions)
    console.print(
        f"rows: {folder / 'compare.csv'}, picture: {folder / 'gaps.png'}",
        soft_wrap=True,
        highlight=False,
        markup=False,
    )


def _note(options: CompareOptions, findings: Findings, asked: int) -> str:
    """How the comparison was run, one line."""
    solved = sum(summary.proven for summary in findings.problems)
    part = "" if len(findings.problems) == asked else f" of {asked} asked for (interrupted)"
    standard, search = load_config().search, options.search
    changed = [
        f"search.{key}={value}" for key, value in vars(search).items() if value != getattr(standard, key)
    ]
    settings = f"; {', '.join(changed)}" if changed else ""
    return (
        f"{len(findings.problems)} problems{part}, {solved} solved by the oracle, "
        f"{options.seeds} seeds each, at most {options.budget:g} s for the gradient search and as long as it "
        f"took for each random rival{settings}. "
        f"Seconds: {options.jobs} at a time, one thread each, on {processor()}."
    )


def _solve_all(work: Sequence[Work], jobs: int, console: Console) -> Iterator[tuple[str, list[Run]]]:
    """Problems as they are solved, with a progress bar on a terminal."""
    columns = (SpinnerColumn(), TextColumn("compare"), BarColumn(), MofNCompleteColumn(),
               TimeElapsedColumn(), TextColumn("{task.description}"))  # fmt: skip
    shown = Progress(*columns, console=console, disable=not console.is_terminal, transient=True)
    with _processes(min(jobs, len(work))) as pool, shown as progress:
        task = progress.add_task("", total=len(work))
        with children_without_interrupts():
            futures: dict[Future[list[Run]], str] = {pool.submit(run_case, x): x.case.name for x in work}
        for future in as_completed(futures):
            rows, name = future.result(), futures[future]
            worst = max((run.gap for run in rows if run.method == SEARCH), default=None)
            progress.update(task, advance=1, description=f"{name}: worst {percent(worst)}")
            yield name, rows


@contextmanager
def _processes(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """A pool that stops at once when its block is left by an exception; SIGTERM is taken for Ctrl-C."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    before = set(multiprocessing.active_children())
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(jobs, mp_context=context, initializer=end_with_parent)
    here = threading.current_thread() is threading.main_thread()
    earlier = signal.signal(signal.SIGTERM, _interrupt) if here else None
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in set(multiprocessing.active_children()) - before:
            child.terminate()
        raise
    finally:
        if earlier is not None:
            signal.signal(signal.SIGTERM, earlier)
    pool.shutdown()


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Without it the default would end this process alone, and leave the workers behind."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    raise SystemExit(
        run_main("experiments.compare", __doc__, CompareOptions, lambda o: compare(o, console_of(FILE_WIDTH)))
    )
