"""Output of the bilevel protocol: TensorBoard curves, `bilevel.csv` and `report.md` from the seeds' files."""

import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from darts_parallel.bilevel.loop import BilevelRecord
from darts_parallel.bilevel.retrain import Retrained, smoothed
from darts_parallel.bilevel.settings import BilevelSettings
from darts_parallel.plans import write_text
from darts_parallel.report import csv_text, markdown_table


class BilevelTracker:
    """Writes one TensorBoard run; TensorBoard is imported here because that takes a second."""

    def __init__(self, folder: Path, settings: BilevelSettings) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._settings = settings
        self._writer = SummaryWriter(log_dir=str(folder))

    def record(self, record: BilevelRecord) -> None:
        """Write the curves of one step of the search."""
        values = {
            "loss/train": record.training_loss,
            "loss/validation": record.validation_loss,
            "search/noise_scale_sequences": record.noise_sequences,
            "search/nats_per_efold": record.nats_per_efold,
        }
        if record.upper is not None:
            upper, prices = record.upper, record.log_slowdown
            values |= {
                f"outer/{name.replace(' ', '_')}": w
                for name, w in upper.record.outer_weights.items()
            }
            values["search/log_slowdown_of_leading"] = upper.log_slowdown
            values["search/entropy"] = upper.record.entropy
            values["search/temperature"] = upper.record.schedules.temperature
            if upper.plan is not None:
                values["search/objective_of_best_rounded"] = upper.plan.value
                values["search/seconds_of_best_rounded"] = upper.plan.seconds
            for pairs, by_block, word in (
                (prices.forward_pairs, prices.forward, "sums_tp{}_b{}"),
                (prices.gradient_pairs, prices.gradient, "gradients_dp{}_g{}"),
            ):
                for block, row in enumerate(by_block.tolist()):
                    for pair, price in zip(pairs, row, strict=True):
                        values[f"log_slowdown/block_{block}/{word.format(*pair)}"] = price
        for tag, value in values.items():
            if value is not None:
                self._writer.add_scalar(tag, value, record.step)

    def retrained(self, variant: str, seed: int, curves: Retrained, seconds: float) -> None:
        """Write the curves of one training from scratch, one tag for each variant and seed."""
        name = variant if self._settings.retrain_seeds == 1 else f"{variant}_{seed}"
        for step, loss in curves.training:
            self._writer.add_scalar(f"retrain_train/{name}", loss, step)
        for step, loss in smoothed(curves.test):
            self._writer.add_scalar(f"retrain_test/{name}", loss, step)
        self._writer.add_scalar(f"time_to_target_s/{name}", seconds, self._settings.num_steps)

    def close(self) -> None:
        """Write what is still in memory and close the file."""
        self._writer.close()


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
    return [
        json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("seed-*.json"))
    ]


def write_report(folder: Path) -> str:
    """Write both files from all seeds in the folder; return the text of `report.md`."""
    seeds = read_seeds(folder)
    rows = [row for data in seeds for row in rows_of(data)]
    write_text(folder / "bilevel.csv", csv_text(COLUMNS, [list(row.values()) for row in rows]))
    text = "\n\n".join([medians(rows), costs(seeds), plans(seeds)]) + "\n"
    write_text(folder / "report.md", text)
    return text


def medians(rows: list[Row]) -> str:
    """Tabulate medians over seeds with the smallest and largest value."""
    figures: list[tuple[str, Callable[[Row], float], str]] = [
        ("test loss (nats)", lambda row: float(row["test_loss"]), ".4f"),
        ("predicted ms/step", lambda row: 1e3 * float(row["seconds_per_step"]), ".3f"),
        ("steps to target", lambda row: float(row["steps_to_target"]), ".1f"),
        ("predicted time to target (s)", lambda row: float(row["time_to_target_s"]), ".3f"),
        ("steps of the search", lambda row: float(row["search_steps"]), ".0f"),
    ]
    lines = []
    for variant in dict.fromkeys(row["variant"] for row in rows):
        group = [row for row in rows if row["variant"] == variant]
        cells = [spread([value(row) for row in group], form) for _, value, form in figures]
        lines.append(
            [variant, *cells, f"{sum(bool(row['reached']) for row in group)} of {len(group)}"]
        )
    return "\n".join(
        markdown_table(["variant", *(name for name, _, _ in figures), "reached"], lines)
    )


def costs(seeds: list[dict[str, Any]]) -> str:
    """Say what the searches cost, and how far the logits' own plans are from the best."""
    searches = [data["search"] for data in seeds]
    steps = [float(search["weight_steps"]) for search in searches]
    seconds = [float(search["seconds"]) for search in searches]
    gaps = [100.0 * search["raw_gap"] for search in searches if search["raw_gap"] is not None]
    lines = [
        f"Searches: {len(searches)}, of {spread(steps, '.0f')} weight steps, trials included; "
        f"{spread(seconds, '.1f')} s on this machine."
    ]
    if gaps:
        lines.append(
            f"The logits' own plan is {spread(gaps, '.2f')} % above the chosen in learned time to target, "
            f"whose optimum is proven in {sum(bool(s['learned_optimum_proven']) for s in searches)} of them."
        )
    return "\n".join(lines)


def plans(seeds: list[dict[str, Any]]) -> str:
    """List every variant's plan."""
    lines = []
    for data in seeds:
        distinct = {
            (run["variant"], run["plan"], tuple(run["blocks"])): None for run in data["runs"]
        }
        lines += [
            f"- seed {data['seed']}, {name}: {plan}; {', '.join(own)}"
            for name, plan, own in distinct
        ]
    return "\n".join(lines)


def spread(values: list[float], form: str) -> str:
    """Write median, smallest and largest; one value alone."""
    if len(values) == 1:
        return f"{values[0]:{form}}"
    return f"{median(values):{form}} ({min(values):{form}} to {max(values):{form}})"
