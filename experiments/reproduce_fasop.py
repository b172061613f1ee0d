"""FASOP's own plans and ours under FASOP's costs, side by side.

    python -m experiments.reproduce_fasop profiles=FOLDER                all cases, with published figures
    python -m experiments.reproduce_fasop profiles=FOLDER study=pareto   GPT2-XL on 80 clusters, with prices

`profiles` is a folder with layer_forward_seconds.csv and micro_batch_multipliers.csv. Prints a table and
leaves fasop.json (pareto.json) in `out`. `model=` and `cluster=` name parts of the cases to run, e.g.
model=BERT.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from darts_parallel.config.checks import require_member
from darts_parallel.config.options import run_main
from darts_parallel.errors import ConfigError, InfeasibleError
from darts_parallel.plan.file import write_json
from darts_parallel.problem.layer_profiles import Profiles, read_profiles
from darts_parallel.report.tables import filled_table
from experiments.fasop.cases import (
    GPT2_XL,
    JOB_STEPS,
    NODES_OF_4,
    NODES_OF_8,
    Case,
    all_cases,
    study_clusters,
)
from experiments.fasop.costs import CostModel
from experiments.fasop.improve import better_plans
from experiments.fasop.program import FasopPlan, program_plans
from experiments.fasop.setting import Offer, count_strategies
from experiments.results_page import console_of, processor

STUDIES = ("cases", "pareto")
PROGRAM_SECONDS = {"pareto": 700.0, "T5, Hetero-large": 64.0}
"""CPU seconds that FASOP's own program was measured to take, on one core of an unnamed machine."""
FILE_WIDTH = 150
"""Columns of the table where there is no terminal."""

Answer = TypeVar("Answer")


@dataclass
class FasopOptions:
    """What to reproduce."""

    profiles: str = ""
    """Folder with the measured layer times; must be given."""
    study: str = "cases"
    """`cases` or `pareto`."""
    model: str = ""
    """Part of the name of the cases to run; none: all."""
    cluster: str = ""
    """Part of the name of the clusters to run; none: all."""
    out: str = "outputs/reproduce_fasop"

    def __post_init__(self) -> None:
        require_member("study", self.study, STUDIES)
        for key, value in (("model", self.model), ("cluster", self.cluster)):
            if value and self.study != "cases":
                raise ConfigError(f"{key}={value} needs study=cases; try study={self.study} alone.")


def _timed(work: Callable[[], Answer]) -> tuple[Answer, float]:
    """An answer and the CPU seconds that it took."""
    began = time.process_time()
    answer = work()
    return answer, time.process_time() - began


def _found(plan: FasopPlan | None, what: str) -> FasopPlan:
    if plan is None:
        raise InfeasibleError(f"{what}: no plan fits the memory of its GPUs; try more nodes.")
    return plan


def entry(plan: FasopPlan, offer: Offer) -> dict[str, Any]:
    """A plan and its seconds, as the JSON files have them: the plan's keys, and again under `plan`."""
    words = plan.to_dict(offer)
    return {**words, "plan": words, "s_per_step": plan.seconds}


def run_cases(options: FasopOptions, profiles: Profiles, console: Console) -> list[dict[str, Any]]:
    """Every case by FASOP's algorithm and by ours."""
    cases = [
        case
        for case in all_cases()
        if options.model in case.name.split(", ")[0] and options.cluster in case.name
    ]
    if not cases:
        names = "; ".join(case.name for case in all_cases())
        raise ConfigError(
            f"model={options.model} cluster={options.cluster} must be part of a case's name; "
            f"try parts of {names}."
        )
    lines: list[tuple[str, ...]] = []
    rows = [_case_rows(case, profiles, lines) for case in cases]
    header = ("case", "plan of", "tp,dp,pp,mbs", "layers per stage", "nodes", "s/step", "published", "off by",
              "CPU s")  # fmt: skip
    console.print(filled_table("Seconds per step under FASOP's costs", header, lines, range(5)))
    return rows


def _case_rows(case: Case, profiles: Profiles, lines: list[tuple[str, ...]]) -> dict[str, Any]:
    model = CostModel(case.job, NODES_OF_4, profiles)
    clusters = [case.counts]
    answers, theirs_s = _timed(lambda: program_plans(model, clusters))
    theirs = _found(answers[0], case.name)
    better, ours_s = _timed(lambda: better_plans(model, clusters))
    ours = _found(better[0], case.name)
    published = case.published
    beside = ("", "")
    if published is not None:
        same = published.layers_per_stage == theirs.layers_per_stage
        off = f"{theirs.seconds / published.seconds - 1:+.2%}{'' if same else ', other layers'}"
        beside = (f"{published.seconds:.4f}", off)
    lines.append((case.name, "FASOP", *_cells(theirs), *beside, f"{theirs_s:.1f}"))
    gain = f"ours {ours.seconds / theirs.seconds - 1:+.2%}"
    lines.append(("", gain, *_cells(ours), "", "", f"{ours_s:.1f}"))
    return {"case": case.name, "fasop": entry(theirs, NODES_OF_4), "ours": entry(ours, NODES_OF_4),
            "cpu_seconds": {"fasop": theirs_s, "ours": ours_s}}  # fmt: skip


def _cells(plan: FasopPlan) -> tuple[str, ...]:
    degrees = plan.degrees
    numbers = (degrees.tp, degrees.dp, degrees.pp, degrees.micro_batch_size)
    layers = " ".join(str(count) for count in plan.layers_per_stage)
    return ",".join(str(n) for n in numbers), layers, _nodes(plan), f"{plan.seconds:.4f}"


def _nodes(plan: FasopPlan) -> str:
    """Nodes in pipeline order, e.g. `1 A100, 3 A10`."""
    runs: list[list[int]] = []
    for kind in plan.placement:
        if runs and runs[-1][1] == kind:
            runs[-1][0] += 1
        else:
            runs.append([1, kind])
    return ", ".join(f"{count} {NODES_OF_4.types[kind].name}" for count, kind in runs)


def run_pareto(profiles: Profiles, console: Console) -> list[dict[str, Any]]:
    """The best plan of every cluster of the study, in seconds and dollars, and the front."""
    model = CostModel(GPT2_XL, NODES_OF_8, profiles)
    groups = study_clusters()
    clusters = [counts for group in groups for counts in group]
    theirs, theirs_s = _timed(lambda: [plan for group in groups for plan in program_plans(model, group)])
    ours, ours_s = _timed(lambda: [plan for group in groups for plan in better_plans(model, group)])
    rows = []
    for counts, their, our in zip(clusters, theirs, ours, strict=True):
        name = " + ".join(f"{n} {kind.name}" for n, kind in zip(counts, NODES_OF_8.types, strict=True) if n)
        price = NODES_OF_8.price_per_second(counts)
        row: dict[str, Any] = {"case": name}
        for key, plan in (("fasop", _found(their, name)), ("ours", _found(our, name))):
            row[key] = {**entry(plan, NODES_OF_8), "dollars": price * plan.seconds * JOB_STEPS}
        rows.append(row)
    for key in ("fasop", "ours"):
        for row, best in zip(
            rows, on_front([(r[key]["s_per_step"], r[key]["dollars"]) for r in rows]), strict=True
        ):
            row[key]["on_front"] = best
    _show_pareto(rows, console)
    count = sum(count_strategies(GPT2_XL, NODES_OF_8, counts) for counts in clusters)
    gains = [row["ours"]["s_per_step"] / row["fasop"]["s_per_step"] - 1 for row in rows]
    program = PROGRAM_SECONDS["pareto"]
    console.print(
        f"{len(rows)} clusters, {count:,} strategies of FASOP; ours against FASOP's plan: "
        f"{min(gains):+.2%} to {max(gains):+.2%}, mean {sum(gains) / len(gains):+.2%}.\n"
        f"CPU seconds: FASOP's algorithm here {theirs_s:.1f}, ours {ours_s:.1f} on {processor()}; "
        f"FASOP's own program about {program:.0f}: {program / ours_s:.0f} times ours.",
        highlight=False,
    )
    return rows


def on_front(points: list[tuple[float, float]]) -> list[bool]:
    """Whether no other point is at least as good in both and better in one."""
    return [
        not any(other != point and other[0] <= point[0] and other[1] <= point[1] for other in points)
        for point in points
    ]


def _show_pareto(rows: list[dict[str, Any]], console: Console) -> None:
    """The clusters where FASOP's or our plan is on its front."""
    lines = []
    for row in sorted(rows, key=lambda r: float(r["ours"]["s_per_step"])):
        if not (row["fasop"]["on_front"] or row["ours"]["on_front"]):
            continue
        for key in ("fasop", "ours"):
            part = row[key]
            numbers = ",".join(str(part[name]) for name in ("tp", "dp", "pp", "micro_batch_size"))
            layers = " ".join(str(count) for count in part["layers_per_stage"])
            figures = (f"{part['s_per_step']:.4f}", f"{part['dollars'] / 1e6:.3f}")
            name = row["case"] if key == "fasop" else ""
            lines.append((name, key, numbers, layers, *figures, "yes" if part["on_front"] else ""))
    header = ("cluster", "plan of", "tp,dp,pp,mbs", "layers per stage", "s/step", "M$", "front")
    console.print(
        filled_table("Front of seconds and dollars, GPT2-XL, 12.5 M steps", header, lines, range(4))
    )


def reproduce(options: FasopOptions, console: Console) -> int:
    """Run a study and write its file; returns the exit status."""
    if not options.profiles:
        raise ConfigError("profiles= must be a folder with measured layer times; try profiles=FOLDER.")
    profiles = read_profiles(options.profiles)
    folder = Path(options.out)
    rows = (
        run_cases(options, profiles, console) if options.study == "cases" else run_pareto(profiles, console)
    )
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ("fasop.json" if options.study == "cases" else "pareto.json")
    write_json(path, rows)
    if options.study == "cases":
        program = PROGRAM_SECONDS["T5, Hetero-large"]
        console.print(f"CPU seconds on {processor()}; FASOP's own program takes about {program:.0f} for T5, "
                      "Hetero-large.", highlight=False)  # fmt: skip
    console.print(f"plans: {path}", soft_wrap=True, highlight=False, markup=False)
    return 0


def main() -> int:
    """Entry point; returns the exit status."""
    return run_main(
        "experiments.reproduce_fasop", __doc__, FasopOptions, lambda o: reproduce(o, console_of(FILE_WIDTH))
    )


if __name__ == "__main__":
    raise SystemExit(main())
