"""Tables of the bilevel protocol: `bilevel.csv` and `report.md` from the seeds' JSON files."""

import json
from collections.abc import Callable, Sequence
from math import exp, log
from pathlib import Path
from statistics import median
from typing import Any

import torch

from darts_parallel.config.bilevel import ARMS
from darts_parallel.plan.file import write_text
from darts_parallel.report.tables import csv_text, markdown_table

COLUMNS = ("arm", "seed", "retrain_seed", "plan", "seconds_per_step", "test_loss", "target", "reached",
           "steps_to_target", "time_to_target_s", "search_steps")  # fmt: skip
TIE = 1e-9
"""Ratios this close to 1 are ties: equal plans."""
MOST_EXACT = 16
"""Pairs up to which all signs are enumerated."""
SAMPLES = 65_536
Row = dict[str, Any]


def rows_of(data: dict[str, Any]) -> list[Row]:
    """One row for each training of one seed's file."""
    return [{name: run[name] for name in COLUMNS} for run in data["runs"]]


def median_time(data: list[dict[str, Any]], arm: str) -> float:
    """Median predicted seconds to the target of one arm over all seeds' files; not a number without any."""
    times = [float(row["time_to_target_s"]) for own in data for row in rows_of(own) if row["arm"] == arm]
    return median(times) if times else float("nan")


def read_seeds(folder: Path) -> list[dict[str, Any]]:
    """All finished seeds of a folder, in order."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("seed-*.json"))]


def write_report(folder: Path) -> str:
    """Write both files from all seeds in the folder; returns the text of `report.md`."""
    seeds = read_seeds(folder)
    rows = [row for data in seeds for row in rows_of(data)]
    write_text(folder / "bilevel.csv", csv_text(COLUMNS, [list(row.values()) for row in rows]))
    parts = [medians(rows), paired(rows), costs(seeds), plans(seeds)]
    text = "\n\n".join(part for part in parts if part) + "\n"
    write_text(folder / "report.md", text)
    return text


def medians(rows: list[Row]) -> str:
    """Medians over seeds with smallest and largest value."""
    figures: list[tuple[str, Callable[[Row], float], str]] = [
        ("test loss (nats)", lambda row: float(row["test_loss"]), ".4f"),
        ("predicted ms/step", lambda row: 1e3 * float(row["seconds_per_step"]), ".3f"),
        ("steps to target", lambda row: float(row["steps_to_target"]), ".1f"),
        ("predicted time to target (s)", lambda row: float(row["time_to_target_s"]), ".3f"),
        ("steps of the search", lambda row: float(row["search_steps"]), ".0f"),
    ]
    header = ["arm", *(name for name, _, _ in figures), "reached"]
    lines = []
    for arm in ARMS:
        mine = [row for row in rows if row["arm"] == arm]
        if mine:
            cells = [spread([value(row) for row in mine], form) for _, value, form in figures]
            reached = f"{sum(bool(row['reached']) for row in mine)} of {len(mine)}"
            lines.append([arm, *cells, reached])
    return "\n".join(markdown_table(header, lines))


def paired(rows: list[Row]) -> str:
    """Bilevel against every other arm under equal retraining seeds: time to target, wins, and p."""
    mine = {(row["seed"], row["retrain_seed"]): row for row in rows if row["arm"] == "bilevel"}
    header = ("bilevel against", "loss difference (nats)", "time to target, ratio", "won, tied, lost", "p")
    lines = []
    for arm in ARMS[1:]:
        pairs = [(mine[row["seed"], row["retrain_seed"]], row) for row in rows
                 if row["arm"] == arm and (row["seed"], row["retrain_seed"]) in mine]  # fmt: skip
        if not pairs:
            continue
        losses = [a["test_loss"] - b["test_loss"] for a, b in pairs]
        logs = [log(a["time_to_target_s"] / b["time_to_target_s"]) for a, b in pairs]
        won, lost = sum(x < -TIE for x in logs), sum(x > TIE for x in logs)
        lines.append([arm, spread(losses, "+.4f"), spread([exp(x) for x in logs], ".3f"),
                 f"{won}, {len(logs) - won - lost}, {lost}", f"{sign_flip_p(logs):.3f}"])  # fmt: skip
    return "\n".join(markdown_table(header, lines)) if lines else ""


def costs(seeds: list[dict[str, Any]]) -> str:
    """What the searches cost beside what they save."""
    searches = [data["search"] for data in seeds]
    steps = [float(search["weight_steps"]) for search in searches]
    seconds = [float(search["seconds"]) for search in searches]
    gaps = [100.0 * search["logits_own_gap"] for search in searches if search["logits_own_gap"] is not None]
    lines = [
        f"Searches: {len(searches)}, of {spread(steps, '.0f')} weight steps, trials included; "
        f"{spread(seconds, '.1f')} s on this machine.",
    ]
    if gaps:
        lines.append(
            f"The logits' own plan is {spread(gaps, '.2f')} % above the chosen in learned time to target, "
            f"whose optimum is proven in {sum(bool(s['learned_optimum_proven']) for s in searches)} of them."
        )
    return "\n".join(lines)


def plans(seeds: list[dict[str, Any]]) -> str:
    """Every arm's plan, as a list."""
    lines = []
    for data in seeds:
        known = {(run["arm"], run["plan"], tuple(run["blocks"])): None for run in data["runs"]}
        lines += [f"- seed {data['seed']}, {arm}: {plan}; {', '.join(blocks)}" for arm, plan, blocks in known]
    return "\n".join(lines)


def spread(values: list[float], form: str) -> str:
    """Median, smallest and largest; one value alone."""
    if len(values) == 1:
        return f"{values[0]:{form}}"
    return f"{median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def sign_flip_p(differences: Sequence[float]) -> float:
    """Two-sided p of a mean difference under exchangeable signs (Fisher 1935, The Design of Experiments).

    All `2^n` signs are enumerated up to 16 pairs, 65,536 of them are drawn beyond.

    Args:
        differences: Of pairs.

    Returns:
        Probability of a mean at least as far from 0; 1 without pairs.
    """
    count = len(differences)
    if not count:
        return 1.0
    values = torch.tensor(differences, dtype=torch.float64)
    if count <= MOST_EXACT:
        bits = torch.arange(2**count).unsqueeze(1) >> torch.arange(count)
        signs = 1.0 - 2.0 * (bits & 1).double()
    else:
        generator = torch.Generator().manual_seed(0)
        signs = 1.0 - 2.0 * torch.randint(2, (SAMPLES, count), generator=generator).double()
        signs[0] = 1.0
    means = (signs @ values).abs()
    return float((means >= values.sum().abs() * (1.0 - 1e-12)).double().mean())
