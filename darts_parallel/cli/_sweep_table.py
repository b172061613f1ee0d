"""Summarise `--multirun`: one table of all jobs, medians over seeds, and a curve of one number."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from rich.console import Console

from darts_parallel.plans import write_text
from darts_parallel.report import csv_text, filled_table, markdown_table, override_values

OVERRIDES = "overrides.json"
"""In the folder of every job: what the sweep gave it."""
SEED = "search.seed"
LONGEST_NAME = 150
"""Characters of a job's folder; most file systems allow 255."""
MEASURES = ("iteration_time_s", "raw_gap", "gap", "seconds")
TITLES = {
    "iteration_time_s": "s/iteration",
    "raw_gap": "raw gap",
    "gap": "gap",
    "seconds": "search s",
}

Value = bool | str | float | int


@dataclass(frozen=True)
class SweepJob:
    """One job of a sweep."""

    overrides: dict[str, Value]
    measures: dict[str, float | None]
    degrees: str
    """dp/tp/pp; ranges where layers differ."""
    scale: tuple[int, float] = (0, 0.0)
    """GPUs, and tokens a second on all of them."""

    @staticmethod
    def read(folder: Path) -> "SweepJob":
        """Read a job from its folder."""
        plan = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
        given = json.loads((folder / OVERRIDES).read_text(encoding="utf-8"))
        search = plan["search"] or {}
        measures = {
            "iteration_time_s": plan["predicted"]["iteration_time_s"],
            "raw_gap": search.get("raw_gap"),
            "gap": search.get("gradient_gap"),
            "seconds": search.get("seconds"),
        }
        degrees = [_range([layer[name] for layer in plan["layers"]]) for name in ("dp", "tp")]
        gpus = sum(group["count"] * group["gpus"] for group in plan["cluster"]["nodes"])
        scale = (gpus, plan["predicted"]["tokens_per_s"])
        return SweepJob(
            override_values(given), measures, "/".join([*degrees, str(plan["pp"])]), scale
        )


def _range(values: Sequence[int]) -> str:
    return str(min(values)) if min(values) == max(values) else f"{min(values)}-{max(values)}"


class SweepTable(Callback):
    """Hydra's callback at the end of a sweep: prints the table and writes it into the sweep's folder."""

    def on_multirun_end(self, config: DictConfig, **settings: Any) -> None:
        """Read all jobs of the sweep and write `results.csv`, `results.md` and, for one number, a curve."""
        folder = Path(config.hydra.sweep.dir)
        jobs = [
            SweepJob.read(path.parent)
            for path in sorted(folder.glob(f"*/{OVERRIDES}"))
            if (path.parent / "plan.json").exists()
        ]
        if not jobs:
            return
        console = Console()
        write_results(folder, jobs, console)
        if config.output.tensorboard:
            console.print(f"curves: tensorboard --logdir {folder}", soft_wrap=True, highlight=False)


def write_results(folder: Path, jobs: Sequence[SweepJob], console: Console) -> None:
    """Print and write what the jobs of a sweep found."""
    keys = swept_keys(jobs)
    columns = [key for key in keys if key != SEED]
    rows = medians(jobs, columns)
    titles = [*columns, *(["seeds"] if SEED in keys else []), *TITLES.values(), "dp/tp/pp"]
    words = [_words(row, columns, seeds=SEED in keys) for row in rows]
    over = ", medians over seeds + from the fastest to the slowest" if SEED in keys else ""
    console.print(filled_table(f"{len(jobs)} jobs{over}", titles, words, range(len(columns))))
    write_text(folder / "results.md", "\n".join([*markdown_table(titles, words, ()), ""]))
    swept = [[job.overrides.get(key, "") for key in keys] for job in jobs]
    measured = ([*(job.measures[name] for name in MEASURES), job.degrees] for job in jobs)
    lines = [[*values, *figures] for values, figures in zip(swept, measured, strict=True)]
    write_text(folder / "results.csv", csv_text([*keys, *MEASURES, "dp_tp_pp"], lines))
    for name in ("results.csv", "results.md"):
        console.print(f"table: {folder / name}", soft_wrap=True, highlight=False)
    scales = sorted(job.scale for job in jobs)
    fastest = {gpus: max(speed for count, speed in scales if count == gpus) for gpus, _ in scales}
    if len(fastest) > 1:
        (first, least), *_ = fastest.items()
        cells = [
            [f"{n}", f"{t:,.0f}", f"{100 * t * first / (n * least):.1f} %"]
            for n, t in fastest.items()
        ]
        console.print(filled_table("Scaling", ["GPUs", "tokens/s", "of linear"], cells, ()))
    numbers = [row[0][columns[0]] for row in rows] if len(columns) == 1 else []
    if len(numbers) > 1 and all(
        isinstance(n, int | float) and not isinstance(n, bool) for n in numbers
    ):
        from darts_parallel.report import write_sweep_curve

        points = [(float(overrides[columns[0]]), measured) for overrides, measured, _, _ in rows]
        write_sweep_curve(folder / "results.png", columns[0], points)
        console.print(f"curve: {folder / 'results.png'}", soft_wrap=True, highlight=False)


def swept_keys(jobs: Sequence[SweepJob]) -> list[str]:
    """Return keys of which two jobs have different values, in the order in which they were given."""
    every = list(dict.fromkeys(key for job in jobs for key in job.overrides))
    return [key for key in every if len({str(job.overrides.get(key, "")) for job in jobs}) > 1]


Row = tuple[dict[str, Value], dict[str, float | None], str, int]
"""Swept values, medians of the measures, degrees of the fastest plan, and how many seeds."""


def medians(jobs: Sequence[SweepJob], columns: Sequence[str]) -> list[Row]:
    """Join jobs that differ by their seeds alone in one row, in the order of the sweep."""
    groups: dict[tuple[str, ...], list[SweepJob]] = {}
    for job in jobs:
        groups.setdefault(tuple(str(job.overrides.get(key, "")) for key in columns), []).append(job)
    rows: list[Row] = []
    for members in groups.values():
        measures: dict[str, float | None] = {}
        for name in MEASURES:
            known = [v for job in members if (v := job.measures[name]) is not None and isfinite(v)]
            measures[name] = median(known) if known else None
            measures[f"{name} spread"] = (
                max(known) / min(known) - 1.0 if known and min(known) > 0 else None
            )
        best = min(members, key=lambda job: job.measures["iteration_time_s"] or float("inf"))
        values = {key: members[0].overrides.get(key, "") for key in columns}
        rows.append((values, measures, best.degrees, len(members)))
    return rows


def _words(row: Row, columns: Sequence[str], *, seeds: bool) -> list[str]:
    values, measures, degrees, count = row
    texts = [str(values[key]) for key in columns] + ([str(count)] if seeds else [])
    for name in MEASURES:
        value = measures[name]
        percent = name in ("raw_gap", "gap")
        texts.append(
            "-" if value is None else f"{100 * value + 0.0:.3f} %" if percent else f"{value:.5g}"
        )
        if (
            seeds
            and name == "iteration_time_s"
            and (spread := measures[f"{name} spread"]) is not None
        ):
            texts[-1] += f" + {100 * spread:.2f} %"
    return [*texts, degrees]


def sweep_folder(number: int, overrides: Sequence[str]) -> str:
    """Name the folder of a job by its number and its overrides, in characters that folders may have."""
    text = ",".join(override.lstrip("+") for override in overrides)
    name = "".join(c if c.isalnum() or c in "-_.,=+[]" else "_" for c in text)
    # what is swept usually stands last
    return f"{number},{name[-LONGEST_NAME:]}"
