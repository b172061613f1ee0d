"""Summarise `--multirun`: one table of all jobs, medians over seeds."""

import json
from collections import defaultdict
from collections.abc import Sequence
from math import inf, isfinite
from pathlib import Path
from statistics import median
from typing import Any

from omegaconf import DictConfig

from darts_parallel.cli._run_folder import OVERRIDES, remove_empty
from darts_parallel.cli._task import PipedConsole
from darts_parallel.config import WORDS
from darts_parallel.plans import span, write_text
from darts_parallel.report import (
    csv_text,
    filled_table,
    fits_label,
    markdown_table,
    override_values,
    print_line,
    shown_path,
)

SEED = "search.seed"
SECONDS = "iteration_time_s"
CHANCE = "out_of_memory_probability"
DEGREES = "dp_tp_pp"
TITLES = {
    SECONDS: "s/iteration",
    "repaired_gap": "gap repaired",
    "gap": "gap",
    "seconds": "search s",
    "tokens_per_s": "tokens/s",
    CHANCE: "fits",
    "micro_batch_size": "mbs",
    DEGREES: "dp/tp/pp",
}
"""Results of a job, and their titles in the table."""
Job = dict[str, Any]
"""Overrides of a job by key, and its results by the names of `TITLES`."""


def read_job(folder: Path) -> Job:
    """Read a job from its folder; degrees are ranges where layers differ, or say that no plan is there."""
    began = folder / OVERRIDES
    given = override_values(json.loads(began.read_text(encoding="utf-8")))
    file = folder / "plan.json"
    # an earlier sweep may have left a plan
    if not file.exists() or file.stat().st_mtime < began.stat().st_mtime:
        return given | dict.fromkeys(TITLES) | {DEGREES: "no plan"}
    plan = json.loads(file.read_text(encoding="utf-8"))
    search = plan["search"] or {}
    gaps = {stage["name"]: stage["gap"] for stage in search.get("stages", ())}
    dp, tp, ep = (span([own.get(name, 1) for own in plan["layers"]]) for name in ("dp", "tp", "ep"))
    found = plan["predicted"] | plan["parallelism"]
    found |= {
        "seconds": search.get("seconds"),
        "repaired_gap": gaps.get("repaired"),
        "gap": gaps.get("chosen"),
    }
    others = {"cp": str(plan["cp"]), "ep": ep}
    words = [f"{name} {degree}" for name, degree in others.items() if degree != "1"]
    found[DEGREES] = " ".join([f"{dp}/{tp}/{plan['pp']}", *words])
    if "failures" in found:
        found["tokens_per_s"] = found["failures"]["tokens_per_s"]
    if "lengths" in plan:  # `predicted` is of full sequences
        best = plan["lengths"]["plans"][0]
        found |= {SECONDS: best["seconds"][0], "tokens_per_s": best["tokens_per_s"]}
        found[CHANCE] = best["chance"]
    return given | {name: found.get(name) for name in TITLES}


def write_sweep(config: DictConfig, began: float = 0.0) -> None:
    """Read all jobs; print their table and write `results.csv` and `results.md`.

    Args:
        began: Wall-clock second from which on jobs are of this sweep.
    """
    folder = Path(config.hydra.sweep.dir)
    files = [path for path in folder.glob(f"*/{OVERRIDES}") if path.stat().st_mtime >= began]
    folders = sorted((path.parent for path in files), key=_place)
    jobs = [read_job(own) for own in folders]
    if all(job[SECONDS] is None for job in jobs):
        for own in folders:
            (own / OVERRIDES).unlink()
            remove_empty(own)
        return
    keys = swept_keys(jobs)
    seeds = SEED in keys
    columns = [key for key in keys if key != SEED]
    words = {key: word for word, key in WORDS.items()}
    short = [words.get(key, key) for key in columns]
    titles = [*short, *["seeds"] * seeds, *TITLES.values()]
    cells = joined_seeds(jobs, columns, seeds=seeds)
    over = ", medians over seeds + how much slower the slowest seed is" if seeds else ""
    console = PipedConsole(quiet=False)
    console.print(filled_table(f"{len(jobs)} jobs{over}", titles, cells, range(len(columns))))
    write_text(folder / "results.md", "\n".join([*markdown_table(titles, cells, ()), ""]))
    names = [*keys, *TITLES]
    lines = [[job.get(name, "") for name in names] for job in jobs]
    write_text(folder / "results.csv", csv_text(names, lines))
    for name in ("results.csv", "results.md"):
        print_line(console, f"table: {folder / name}")
    if config.output.tensorboard:
        print_line(console, f"curves: tensorboard --logdir {shown_path(folder)}")


def _place(folder: Path) -> tuple[int, str]:
    """Return what jobs are sorted by: the number before the first comma, in which 10 follows 9."""
    return folder.name.find(","), folder.name


def swept_keys(jobs: Sequence[Job]) -> list[str]:
    """Return the keys whose values differ between jobs, in the order of the command."""
    keys = dict.fromkeys(key for job in jobs for key in job if key not in TITLES)
    return [key for key in keys if len({str(job.get(key, "")) for job in jobs}) > 1]


def joined_seeds(jobs: Sequence[Job], columns: Sequence[str], *, seeds: bool) -> list[list[str]]:
    """Return a line of the table for the jobs that differ by their seeds alone, in the order of the sweep.

    Args:
        seeds: Whether a line has their number and spread, too.
    """
    groups = defaultdict(list)
    for job in jobs:
        groups[tuple(str(job.get(key, "")) for key in columns)].append(job)
    lines = []
    for values, own in groups.items():
        own.sort(key=lambda job: job[SECONDS] or inf)
        line = [*values, *[str(len(own))] * seeds]
        line += [_cell([job[name] for job in own], name, spread=seeds) for name in TITLES]
        lines.append(line)
    return lines


def _cell(values: Sequence[Any], name: str, *, spread: bool) -> str:
    """Write a result in the order of seconds: a median and its spread, or the degrees of the first."""
    if name == DEGREES:
        return str(values[0])
    known = [value for value in values if value is not None and isfinite(value)]
    if not known:
        return "-"
    if name.endswith("gap"):
        return f"{100 * median(known) + 0.0:.3f} %"
    middle = median(known)
    if name == CHANCE:
        return fits_label(middle)
    slower = f" + {100 * (max(known) / min(known) - 1.0):.2f} %"
    text = f"{middle:,.0f}" if middle >= 1e5 else f"{middle:.5g}"
    return text + (slower if spread and name == SECONDS else "")
