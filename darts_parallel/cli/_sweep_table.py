"""Summarise `--multirun`: one table of all jobs, medians over seeds, and a curve of one number."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite
from pathlib import Path
from statistics import median

from omegaconf import DictConfig
from rich.console import Console

from darts_parallel.cli._run_folder import OVERRIDES
from darts_parallel.plans import write_text
from darts_parallel.report import csv_text, filled_table, markdown_table, override_values

SEED = "search.seed"
TITLES = {
    "iteration_time_s": "s/iteration",
    "repaired_gap": "gap repaired",
    "gap": "gap",
    "seconds": "search s",
}
"""Measures of a job, and their titles in the table."""

Value = bool | str | float | int


@dataclass(frozen=True)
class SweepJob:
    """One job of a sweep."""

    overrides: dict[str, Value]
    measures: dict[str, float | None]
    """Values by the names of `TITLES`."""
    degrees: str
    """dp/tp/pp; ranges where layers differ."""
    gpus: int = 0
    tokens_per_s: float = 0.0

    @staticmethod
    def read(folder: Path) -> "SweepJob":
        """Read a job from its folder."""
        plan = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
        given = json.loads((folder / OVERRIDES).read_text(encoding="utf-8"))
        predicted = plan["predicted"]
        search = plan["search"] or {}
        gaps = {stage["name"]: stage["gap"] for stage in search.get("stages", ())}
        measures = {
            "iteration_time_s": predicted["iteration_time_s"],
            "repaired_gap": gaps.get("repaired"),
            "gap": gaps.get("chosen"),
            "seconds": search.get("seconds"),
        }
        degrees = [_range([layer[name] for layer in plan["layers"]]) for name in ("dp", "tp")]
        degrees.append(str(plan["pp"]))
        gpus = sum(group["count"] * group["gpus"] for group in plan["cluster"]["nodes"])
        speed = predicted["tokens_per_s"]
        return SweepJob(override_values(given), measures, "/".join(degrees), gpus, speed)


def _range(values: Sequence[int]) -> str:
    least = min(values)
    most = max(values)
    return str(least) if least == most else f"{least}-{most}"


@dataclass(frozen=True)
class SweepRow:
    """Jobs that differ by their seeds alone."""

    values: dict[str, Value]
    """Values of the keys that the sweep changes."""
    jobs: list[SweepJob]

    def known(self, measure: str) -> list[float]:
        """List the finite values of a measure."""
        found = [job.measures[measure] for job in self.jobs]
        return [value for value in found if value is not None and isfinite(value)]

    def median(self, measure: str) -> float | None:
        """Return the median of a measure; None where no job has it."""
        known = self.known(measure)
        return median(known) if known else None

    @property
    def spread(self) -> str:
        """How far the slowest plan is from the fastest, for the table."""
        known = self.known("iteration_time_s")
        if not known or min(known) <= 0:
            return ""
        return f" + {100 * (max(known) / min(known) - 1.0):.2f} %"

    @property
    def degrees(self) -> str:
        """Degrees of the fastest plan."""
        return min(self.jobs, key=lambda job: job.measures["iteration_time_s"] or inf).degrees

    def cells(self, *, seeds: bool) -> list[str]:
        """Return the line of the table; with `seeds` their number and the spread."""
        texts = [str(value) for value in self.values.values()]
        if seeds:
            texts.append(str(len(self.jobs)))
        for measure in TITLES:
            texts.append(self._cell(measure))
            if seeds and measure == "iteration_time_s":
                texts[-1] += self.spread
        return [*texts, self.degrees]

    def _cell(self, measure: str) -> str:
        value = self.median(measure)
        if value is None:
            return "-"
        percent = measure.endswith("gap")
        return f"{100 * value + 0.0:.3f} %" if percent else f"{value:.5g}"


def write_sweep(config: DictConfig) -> None:
    """Read all jobs; write `results.csv`, `results.md` and, for one number, a curve."""
    folder = Path(config.hydra.sweep.dir)
    folders = [path.parent for path in sorted(folder.glob(f"*/{OVERRIDES}"))]
    jobs = [SweepJob.read(own) for own in folders if (own / "plan.json").exists()]
    if not jobs:
        return
    console = Console()
    write_results(folder, jobs, console)
    if config.output.tensorboard:
        _say(console, f"curves: tensorboard --logdir {folder}")


def write_results(folder: Path, jobs: Sequence[SweepJob], console: Console) -> None:
    """Print and write what the jobs of a sweep found."""
    keys = swept_keys(jobs)
    columns = [key for key in keys if key != SEED]
    seeds = SEED in keys
    rows = joined_seeds(jobs, columns)
    titles = [*columns, *(["seeds"] if seeds else []), *TITLES.values(), "dp/tp/pp"]
    cells = [row.cells(seeds=seeds) for row in rows]
    over = ", medians over seeds + from the fastest to the slowest" if seeds else ""
    console.print(filled_table(f"{len(jobs)} jobs{over}", titles, cells, range(len(columns))))
    write_text(folder / "results.md", "\n".join([*markdown_table(titles, cells, ()), ""]))
    lines = [
        [*(job.overrides.get(key, "") for key in keys), *job.measures.values(), job.degrees]
        for job in jobs
    ]
    write_text(folder / "results.csv", csv_text([*keys, *TITLES, "dp_tp_pp"], lines))
    for name in ("results.csv", "results.md"):
        _say(console, f"table: {folder / name}")
    _print_scaling(jobs, console)
    if len(columns) == 1:
        _draw_curve(folder, columns[0], rows, console)


def _say(console: Console, line: str) -> None:
    console.print(line, soft_wrap=True, highlight=False)


def _print_scaling(jobs: Sequence[SweepJob], console: Console) -> None:
    """Print the largest tokens/s of every number of GPUs, where there are several."""
    fastest: dict[int, float] = {}
    for job in sorted(jobs, key=lambda job: job.gpus):
        fastest[job.gpus] = max(job.tokens_per_s, fastest.get(job.gpus, 0.0))
    if len(fastest) < 2:
        return
    fewest, slowest = next(iter(fastest.items()))
    cells = []
    for gpus, speed in fastest.items():
        linear = slowest * gpus / fewest
        cells.append([f"{gpus}", f"{speed:,.0f}", f"{100 * speed / linear:.1f} %"])
    console.print(filled_table("Scaling", ["GPUs", "tokens/s", "of linear"], cells, ()))


def _draw_curve(folder: Path, key: str, rows: Sequence[SweepRow], console: Console) -> None:
    """Draw the measures over a key whose values are numbers."""
    points = []
    for row in rows:
        value = row.values[key]
        if isinstance(value, bool | str):
            return
        points.append((float(value), {name: row.median(name) for name in TITLES}))
    if len(points) < 2:
        return
    from darts_parallel.report import write_sweep_curve

    write_sweep_curve(folder / "results.png", key, points)
    _say(console, f"curve: {folder / 'results.png'}")


def swept_keys(jobs: Sequence[SweepJob]) -> list[str]:
    """Return the keys whose values differ between jobs, in the order of the command."""
    values: dict[str, set[str]] = {}
    for key in (key for job in jobs for key in job.overrides):
        values[key] = {str(job.overrides.get(key, "")) for job in jobs}
    return [key for key, found in values.items() if len(found) > 1]


def joined_seeds(jobs: Sequence[SweepJob], columns: Sequence[str]) -> list[SweepRow]:
    """Join jobs that differ by their seeds alone in one row, in the order of the sweep."""
    rows: dict[str, SweepRow] = {}
    for job in jobs:
        values = {key: job.overrides.get(key, "") for key in columns}
        rows.setdefault(str(values), SweepRow(values, [])).jobs.append(job)
    return list(rows.values())
