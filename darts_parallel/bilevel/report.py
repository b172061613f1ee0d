"""Tables of the bilevel protocol: `bilevel.csv` and `report.md` from the seeds' JSON files."""

import csv
import json
from collections.abc import Callable
from math import exp
from pathlib import Path
from statistics import median
from typing import Any

from darts_parallel.config.bilevel import ARMS

REFERENCE = "all_16_bit"
"""Its final loss is the target of its seed, its curve gives the exchange rate of its seed."""
COLUMNS = ("arm", "seed", "validation_loss", "seconds_per_step", "steps_to_target", "time_to_target_s")
Row = dict[str, Any]


def rows_of(data: dict[str, Any]) -> list[Row]:
    """One row for each arm of one seed.

    Steps to target are those after which an arm reaches the reference's final loss, by the
    reference's own measured exchange rate.
    """
    reference = data["runs"][REFERENCE]
    steps, rate = data["settings"]["retrain_steps"], reference["nats_per_efold"]
    rows = []
    for arm, run in data["runs"].items():
        gap = run["validation_loss"] - reference["validation_loss"]
        to_target = steps * exp(gap / rate) if rate else float("nan")
        rows.append({
            "arm": arm,
            "seed": data["seed"],
            "validation_loss": run["validation_loss"],
            "seconds_per_step": run["seconds_per_step"],
            "steps_to_target": to_target,
            "time_to_target_s": to_target * run["seconds_per_step"],
        })  # fmt: skip
    return rows


def write_report(folder: Path) -> str:
    """Write both files from all seeds in the folder; returns the text of `report.md`."""
    seeds = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("seed-*.json"))]
    rows = [row for data in seeds for row in rows_of(data)]
    with (folder / "bilevel.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    text = (
        "\n\n".join([f"{len(seeds)} seeds, network {folder.name}", medians(rows), paired(rows), plans(seeds)])
        + "\n"
    )
    (folder / "report.md").write_text(text, encoding="utf-8")
    return text


def medians(rows: list[Row]) -> str:
    """Medians over seeds with smallest and largest value."""
    figures: list[tuple[str, Callable[[Row], float], str]] = [
        ("validation loss (nats)", lambda row: float(row["validation_loss"]), ".4f"),
        ("predicted ms/step", lambda row: 1e3 * float(row["seconds_per_step"]), ".3f"),
        ("steps to target", lambda row: float(row["steps_to_target"]), ".1f"),
        ("predicted time to target (s)", lambda row: float(row["time_to_target_s"]), ".3f"),
    ]
    lines = ["| arm | " + " | ".join(name for name, _, _ in figures) + " |", "| --- " * 5 + "|"]
    for arm in ARMS:
        mine = [row for row in rows if row["arm"] == arm]
        if mine:
            cells = [spread([value(row) for row in mine], form) for _, value, form in figures]
            lines.append(f"| {arm} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def paired(rows: list[Row]) -> str:
    """Bilevel against every other arm under equal seeds: loss and time to target."""
    by_key = {(row["arm"], row["seed"]): row for row in rows}
    seeds = sorted({row["seed"] for row in rows})
    lines = [
        "| bilevel against | loss difference (nats) | time to target, ratio | seeds won |",
        "| --- " * 4 + "|",
    ]
    for arm in ARMS[1:]:
        pairs = [(by_key["bilevel", s], by_key[arm, s]) for s in seeds
                 if ("bilevel", s) in by_key and (arm, s) in by_key]  # fmt: skip
        if pairs:
            losses = [a["validation_loss"] - b["validation_loss"] for a, b in pairs]
            ratios = [a["time_to_target_s"] / b["time_to_target_s"] for a, b in pairs]
            won = sum(ratio < 1.0 for ratio in ratios)
            cells = f"{spread(losses, '+.4f')} | {spread(ratios, '.3f')} | {won} of {len(pairs)}"
            lines.append(f"| {arm} | {cells} |")
    return "\n".join(lines)


def plans(seeds: list[dict[str, Any]]) -> str:
    """Every arm's plan, as a list."""
    return "\n".join(
        f"- seed {data['seed']}, {arm}: {', '.join(run['plan'])}; batch {run['global_batch_size']}"
        for data in seeds
        for arm, run in data["runs"].items()
    )


def spread(values: list[float], form: str) -> str:
    """Median, smallest and largest."""
    return f"{median(values):{form}} ({min(values):{form}} to {max(values):{form}})"
