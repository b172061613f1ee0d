"""Run a study: one question, its tasks solved by a pool of processes, a file of rows, one page.

A study is a dataclass of options (`StudyOptions`), a function that solves one task (a problem, a seed, a
method) and returns rows, and a function that makes the text of all rows (`report_text`). `run_study` does
the rest: it writes `NAME.csv` after every task and `NAME.md` at the end, prints the text, and writes the
page where `publish=true`. Ctrl-C keeps what is done.
"""

import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from darts_parallel.config import (
    MAX_PROCESSES,
    begin_worker,
    children_without_interrupts,
    ranged,
)
from darts_parallel.errors import INTERRUPTED
from darts_parallel.gradient import SearchResult
from darts_parallel.plans import write_text
from darts_parallel.report import csv_of
from experiments.results_page import Page, publish, typed_command

Task = TypeVar("Task")
Row = TypeVar("Row")
Paragraph = str | Sequence[str]
"""A paragraph, or a table as a list of lines."""


@dataclass
class StudyOptions:
    """Hold the options that every study has."""

    jobs: int = ranged(2, 1, MAX_PROCESSES)
    """Number of tasks that are solved at the same time, each in a process of one thread; 1: here."""
    out: str = ""
    """Folder of the rows and the text; empty: outputs/NAME."""
    publish: bool = False
    """Whether experiments/results/NAME.md is written, too."""


def report_text(*parts: Paragraph) -> str:
    """Return the answer of a study; empty parts are left out.

    Args:
        parts: Paragraphs, and tables as lists of lines: how it was run, the table, and what follows from it
            in a sentence.
    """
    blocks = (part if isinstance(part, str) else "\n".join(part) for part in parts)
    return "\n\n".join(block for block in blocks if block) + "\n"


@dataclass(frozen=True)
class Study(Generic[Task, Row]):
    """State a question and how it is answered."""

    name: str
    """Name of the module."""
    question: str
    limits: str
    """Sentence on what the answer does not show."""
    solve: Callable[[Task], Sequence[Row]]
    """Solve one task; the rows are dataclasses of one type."""
    report: Callable[[Sequence[Row]], str]
    """Make the text of the rows of all tasks, or of those that are done."""
    page: str = ""
    """Name of the page and of the files; empty: `name`."""

    @property
    def title(self) -> str:
        """Return the name of the page and of the files."""
        return self.page or self.name

    def folder(self, options: "StudyOptions") -> Path:
        """Return the folder of the files."""
        return Path(options.out or f"outputs/{self.name}")


def run_study(study: Study[Task, Row], tasks: Mapping[str, Task], options: StudyOptions) -> int:
    """Solve all tasks, write what came out, and return the exit status.

    Args:
        tasks: Every task by the name that is shown when it is done.
    """
    folder = study.folder(options)
    done = {}
    rows = []
    status = 0
    try:
        for name, found in solve_all(study.solve, tasks, options.jobs):
            done[name] = found
            print(f"{len(done)} of {len(tasks)}: {name}", flush=True)
            folder.mkdir(parents=True, exist_ok=True)  # a study that is refused leaves nothing
            rows = [row for key in tasks for row in done.get(key, ())]
            write_text(folder / f"{study.title}.csv", _csv(rows))
    except KeyboardInterrupt:
        status = INTERRUPTED
    if rows:
        _write(study, study.report(rows), folder, options.publish and not status)
    if status:
        print(f"interrupted: {len(done)} of {len(tasks)} tasks are done.")
    return status


def _csv(rows: Sequence[Any]) -> str:
    """Return all fields that a table can hold: curves are files of their own."""
    if not rows:
        return ""
    kind = type(rows[0])
    return csv_of(kind, rows, without=[entry.name for entry in fields(kind) if not entry.repr])


def _write(
    study: Study[Task, Row],
    text: str,
    folder: Path,
    page: bool,
) -> None:
    """Print the text and write it and, where asked, the page."""
    write_text(folder / f"{study.title}.md", text)
    print(f"\n{text.rstrip()}\n\nfiles: {folder}")
    if page:
        command = typed_command(f"experiments.{study.name}")
        page_of = Page(study.title, study.question, command, text, study.limits)
        print(f"page: {publish(page_of)}")


def solve_all(
    solve: Callable[[Task], Row], tasks: Mapping[str, Task], jobs: int
) -> Iterator[tuple[str, Row]]:
    """Solve tasks in processes of one thread each and yield every name with its result, as they end.

    No process outlives this one, however it ends.

    Args:
        solve: A function of a module; called with a task, in another process.
        tasks: By name.
        jobs: Processes; with 1 everything is solved in this one.
    """
    jobs = min(jobs, len(tasks))
    if jobs < 2:
        torch.set_num_threads(1)
        yield from ((name, solve(task)) for name, task in tasks.items())
        return
    context = multiprocessing.get_context("spawn")
    with children_without_interrupts():
        pool = ProcessPoolExecutor(jobs, context, _begin)
        names = {pool.submit(solve, task): name for name, task in tasks.items()}
    try:
        for answer in as_completed(names):
            yield names[answer], answer.result()
    finally:
        for process in multiprocessing.active_children():  # after Ctrl-C they are still at work
            process.kill()
        pool.shutdown(cancel_futures=True)


def _begin() -> None:
    """Take one thread, and end with the process that asked for this one."""
    begin_worker()
    torch.set_num_threads(1)


def unless_interrupted(found: SearchResult) -> SearchResult:
    """Return a search's result, unless Ctrl-C cut it short.

    A search answers Ctrl-C with its best plan so far; a study of many searches would go on with the next.

    Errors:
        KeyboardInterrupt: the user stopped the search.
    """
    if found.stopped_by == "user":
        raise KeyboardInterrupt
    return found
