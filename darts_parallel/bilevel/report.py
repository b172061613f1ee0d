"""Output of the bilevel protocol: TensorBoard curves, `bilevel.csv` and `report.md` from the seeds' files."""

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from torch import Tensor

from darts_parallel.bilevel._quantize import Pair
from darts_parallel.bilevel._relaxed_plans import UpperStep
from darts_parallel.bilevel.loop import BilevelRecord
from darts_parallel.bilevel.retrain import Retrained, smoothed
from darts_parallel.bilevel.settings import BilevelSettings
from darts_parallel.plans import write_text
from darts_parallel.report import RESULTS, SearchCurves, csv_text, markdown_table


class BilevelTracker:
    """Writes one TensorBoard run.

    Args:
        names: Names of the model's layers.
    """

    def __init__(self, folder: Path, settings: BilevelSettings, names: Sequence[str]) -> None:
        self._settings = settings
        self._names = names
        self._curves = SearchCurves(folder)

    def record(self, record: BilevelRecord) -> None:
        """Write the curves of one step of the search."""
        values: dict[str, float | None] = {"loss/train": record.training_loss}
        values["loss/validation"] = record.validation_loss
        values["search/noise_scale_sequences"] = record.noise_sequences
        values["search/nats_per_efold"] = record.nats_per_efold
        if record.upper is not None:
            values |= _upper_values(record.upper)
            prices = record.log_slowdown
            values |= _prices("sums_tp{}_b{}", prices.forward_pairs, prices.forward)
            values |= _prices("gradients_dp{}_g{}", prices.gradient_pairs, prices.gradient)
            self._curves.record(record.upper.record, self._names)
        known = {tag: value for tag, value in values.items() if value is not None}
        self._curves.scalars(known, record.step)

    def retrained(
        self,
        variant: str,
        seed: int,
        curves: Retrained,
        seconds: float,
    ) -> None:
        """Write the curves of one training from scratch, one tag for each variant and seed."""
        name = variant if self._settings.retrain_seeds == 1 else f"{variant}_{seed}"
        for step, loss in curves.training:
            self._curves.scalars({f"retrain_train/{name}": loss}, step)
        for step, loss in smoothed(curves.test):
            self._curves.scalars({f"retrain_test/{name}": loss}, step)
        tag = f"{RESULTS}/time_to_target_s/{name}"
        self._curves.scalars({tag: seconds}, self._settings.num_steps)

    def close(self) -> None:
        """Write what is still in memory and close the file."""
        self._curves.finish()
        self._curves.writer.close()


def _upper_values(upper: UpperStep) -> dict[str, float]:
    """Return what one step of the logits has besides the curves of every search."""
    values = {"search/log_slowdown_of_leading": upper.log_slowdown}
    if upper.plan is not None:
        values["search/objective_of_best_rounded"] = upper.plan.value
        values["search/seconds_of_best_rounded"] = upper.plan.seconds
    return values


def _prices(
    word: str,
    pairs: Sequence[Pair],
    by_block: Tensor,
) -> dict[str, float]:
    """Return the log slowdown by every pair in every block; `word` is filled with the pair."""
    values = {}
    for block, row in enumerate(by_block.tolist()):
        for pair, price in zip(pairs, row, strict=True):
            values[f"log_slowdown/block_{block}/{word.format(*pair)}"] = price
    return values


COLUMNS = (
    "variant",
    "seed",
    "retrain_seed",
    "plan",
    "seconds_per_step",
    "test_loss",
    "target",
    "reached",
    "steps_to_target",
    "time_to_target_s",
    "search_steps",
)
Row = dict[str, Any]


def rows_of(data: dict[str, Any]) -> list[Row]:
    """Return one row for each training of one seed's file."""
    return [{name: run[name] for name in COLUMNS} for run in data["runs"]]


def median_time(data: list[dict[str, Any]], variant: str) -> float:
    """Return the median predicted seconds to the target of one variant; not a number without any."""
    rows = [row for seed in data for row in rows_of(seed) if row["variant"] == variant]
    return median(float(row["time_to_target_s"]) for row in rows) if rows else float("nan")


def read_seeds(folder: Path) -> list[dict[str, Any]]:
    """Read all finished seeds of a folder, in order."""
    paths = sorted(folder.glob("seed-*.json"))
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def write_report(folder: Path) -> str:
    """Write both files from all seeds in the folder; return the text of `report.md`."""
    seeds = read_seeds(folder)
    rows = [row for data in seeds for row in rows_of(data)]
    write_text(folder / "bilevel.csv", csv_text(COLUMNS, [list(row.values()) for row in rows]))
    text = "\n\n".join([medians(rows), costs(seeds), plans(seeds)]) + "\n"
    write_text(folder / "report.md", text)
    return text


FIGURES = {
    "test_loss": ("test loss (nats)", ".4f", 1.0),
    "seconds_per_step": ("predicted ms/step", ".3f", 1e3),
    "steps_to_target": ("steps to target", ".1f", 1.0),
    "time_to_target_s": ("predicted time to target (s)", ".3f", 1.0),
    "search_steps": ("steps of the search", ".0f", 1.0),
}
"""Title, format and unit factor of a column of the table of medians, by the key of its rows."""


def medians(rows: list[Row]) -> str:
    """Tabulate medians over seeds with the smallest and largest value."""
    lines = []
    for variant in dict.fromkeys(row["variant"] for row in rows):
        group = [row for row in rows if row["variant"] == variant]
        cells = [variant]
        for key, (_, form, factor) in FIGURES.items():
            values = [factor * float(row[key]) for row in group]
            cells.append(spread(values, form))
        reached = sum(bool(row["reached"]) for row in group)
        lines.append([*cells, f"{reached} of {len(group)}"])
    titles = [title for title, _, _ in FIGURES.values()]
    header = ["variant", *titles, "reached"]
    return "\n".join(markdown_table(header, lines))


def costs(seeds: list[dict[str, Any]]) -> str:
    """Say what the searches cost, and how far the logits' own plans are from the best."""
    searches = [data["search"] for data in seeds]
    steps = [float(search["weight_steps"]) for search in searches]
    seconds = [float(search["seconds"]) for search in searches]
    raw = [search["raw_gap"] for search in searches]
    gaps = [100.0 * gap for gap in raw if gap is not None]
    lines = [
        f"Searches: {len(searches)}, of {spread(steps, '.0f')} weight steps, trials included; "
        f"{spread(seconds, '.1f')} s on this machine."
    ]
    if gaps:
        proven = sum(bool(search["learned_optimum_proven"]) for search in searches)
        lines.append(
            f"The logits' own plan is {spread(gaps, '.2f')} % above the chosen in learned time to "
            f"target, whose optimum is proven in {proven} of them."
        )
    return "\n".join(lines)


def plans(seeds: list[dict[str, Any]]) -> str:
    """List every variant's plan."""
    lines = []
    for data in seeds:
        for run in data["runs"]:
            blocks = ", ".join(run["blocks"])
            lines.append(f"- seed {data['seed']}, {run['variant']}: {run['plan']}; {blocks}")
    lines = list(dict.fromkeys(lines))
    return "\n".join(lines)


def spread(values: list[float], form: str) -> str:
    """Write median, smallest and largest; one value alone."""
    if len(values) == 1:
        return f"{values[0]:{form}}"
    return f"{median(values):{form}} ({min(values):{form}} to {max(values):{form}})"
