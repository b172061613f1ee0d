"""Summarise `--multirun`: one table of all jobs, medians over seeds."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite
from pathlib import Path
from statistics import median

from omegaconf import DictConfig
from rich.console import Console

from darts_parallel.cli._run_folder import OVERRIDES
from darts_parallel.plans import span, write_text
from darts_parallel.report import (
    csv_text,
    filled_table,
    markdown_table,
    override_values,
    print_line,
)

SEED = "search.seed"
SECONDS = "iteration_time_s"
TITLES = {
    SECONDS: "s/iteration",
    "repaired_gap": "gap repaired",
    "gap": "gap",
    "seconds": "search s",
    "tokens_per_s": "tokens/s",
}
"""Measures of a job, and their titles in the table."""


@dataclass(frozen=True)
class SweepJob:
    """One job of a sweep."""

    overrides: dict[str, bool | str | float | int]
    measures: dict[str, float | None]
    """Values by the names of `TITLES`."""
    degrees: str
    """dp/tp/pp; ranges where layers differ."""

    @staticmethod
    def read(folder: Path) -> "SweepJob":
        """Read a job from its folder."""
        plan = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
        given = json.loads((folder / OVERRIDES).read_text(encoding="utf-8"))
        search = plan["search"] or {}
        gaps = {stage["name"]: stage["gap"] for stage in search.get("stages", ())}
        found = {**plan["predicted"], "seconds": search.get("seconds")}
        found |= {"repaired_gap": gaps.get("repaired"), "gap": gaps.get("chosen")}
        degrees = [span([layer[name] for layer in plan["layers"]]) for name in ("dp", "tp")]
        measures = {name: found[name] for name in TITLES}
        return SweepJob(override_values(given), measures, "/".join([*degrees, str(plan["pp"])]))


def write_sweep(config: DictConfig) -> None:
    """Read all jobs; print their table and write `results.csv` and `results.md`."""
    folder = Path(config.hydra.sweep.dir)
    folders = [path.parent for path in sorted(folder.glob(f"*/{OVERRIDES}"))]
    jobs = [SweepJob.read(own) for own in folders if (own / "plan.json").exists()]
    if not jobs:
        return
    keys = swept_keys(jobs)
    columns = [key for key in keys if key != SEED]
    seeds = SEED in keys
    titles = [*columns, *(["seeds"] if seeds else []), *TITLES.values(), "dp/tp/pp"]
    cells = joined_seeds(jobs, columns, seeds=seeds)
    over = ", medians over seeds + from the fastest to the slowest" if seeds else ""
    console = Console()
    console.print(filled_table(f"{len(jobs)} jobs{over}", titles, cells, range(len(columns))))
    write_text(folder / "results.md", "\n".join([*markdown_table(titles, cells, ()), ""]))
    lines = []
    for job in jobs:
        given = [job.overrides.get(key, "") for key in keys]
        lines.append([*given, *job.measures.values(), job.degrees])
    write_text(folder / "results.csv", csv_text([*keys, *TITLES, "dp_tp_pp"], lines))
    words = [f"table: {folder / name}" for name in ("results.csv", "results.md")]
    if config.output.tensorboard:
        words.append(f"curves: tensorboard --logdir {folder}")
    for line in words:
        print_line(console, line)


def swept_keys(jobs: Sequence[SweepJob]) -> list[str]:
    """Return the keys whose values differ between jobs, in the order of the command."""
    keys = dict.fromkeys(key for job in jobs for key in job.overrides)
    return [key for key in keys if len({str(job.overrides.get(key, "")) for job in jobs}) > 1]


def joined_seeds(
    jobs: Sequence[SweepJob], columns: Sequence[str], *, seeds: bool
) -> list[list[str]]:
    """Return a line of the table for the jobs that differ by their seeds alone, in the order of the sweep.

    Args:
        seeds: Whether a line has their number and spread, too.
    """
    groups: dict[tuple[str, ...], list[SweepJob]] = {}
    for job in jobs:
        values = tuple(str(job.overrides.get(key, "")) for key in columns)
        groups.setdefault(values, []).append(job)
    lines = []
    for values, own in groups.items():
        line = [*values, *([str(len(own))] if seeds else [])]
        line += [_cell(own, measure, spread=seeds) for measure in TITLES]
        fastest = min(own, key=lambda job: job.measures[SECONDS] or inf)
        lines.append([*line, fastest.degrees])
    return lines


def _cell(jobs: Sequence[SweepJob], measure: str, *, spread: bool) -> str:
    """Write the median of a measure, and how far the slowest plan is from the fastest."""
    values = [job.measures[measure] for job in jobs]
    known = [value for value in values if value is not None and isfinite(value)]
    if not known:
        return "-"
    if measure.endswith("gap"):
        return f"{100 * median(known) + 0.0:.3f} %"
    slower = max(known) / min(known) - 1.0 if spread and measure == SECONDS else None
    return f"{median(known):.5g}" + ("" if slower is None else f" + {100 * slower:.2f} %")
