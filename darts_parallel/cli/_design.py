"""`darts-parallel design`: the best use of a budget for hardware, and what one more dollar buys."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import exp, log
from pathlib import Path
from typing import Any

import torch

from darts_parallel.config import FOLDER, parse, require, run_folder, run_subcommand
from darts_parallel.cost import evaluate
from darts_parallel.design import (
    FIGURES,
    Answer,
    Design,
    Designer,
    read_design,
    scaled_config,
    upgrades,
)
from darts_parallel.planner import plan
from darts_parallel.plans import read_plan, required_config, write_json, write_text
from darts_parallel.problem import Problem
from darts_parallel.report import (
    Outcome,
    csv_text,
    markdown_table,
    plan_dict,
    write_scalars,
    write_sweep_curve,
)

HELP = f"""\
darts-parallel design design=buyers [key=value ...]
finds the figures of the hardware that make an iteration shortest for budget=, or the least budget for target=
seconds, with the plan on it, a proven lower bound, what one more dollar saves at every figure, and the Pareto
front over budgets. design= names a file of conf/design, or of folder=, with knobs, prices, jobs and choices.

darts-parallel design plan=plan.json
tells what 10 % more of each figure is worth to a plan, and the next product, without prices.

Figures: {", ".join(FIGURES)}; nodes.1.FIGURE is that of one node group.
Files go to hydra.run.dir=FOLDER, or else outputs/DATE/TIME.
Options, with their defaults:
"""
SPACE = "even uniform plans of the jobs' spaces, all enumerated"  # which the bound is about
CHANGES = ("budget", "target", "budgets", "tolerance")
# parts of an answer under the same names in design.json, and in pareto.csv
ANSWER = (
    "knobs",
    "factors",
    "costs",
    "spent",
    "budget",
    "iteration_time_s",
    "job_iteration_times_s",
    "gap",
    "bound_iteration_time_s",
    "planner_calls",
    "elasticities",
    "seconds_saved_per_unit",
)
FRONT = ("budget", "spent", "iteration_time_s", "bound_iteration_time_s", "planner_calls")


@dataclass
class DesignOptions:
    """Command line; what is given takes the place of the file's."""

    design: str = ""
    plan: str = ""
    folder: str = ""
    budget: float | None = None
    target: float | None = None
    budgets: list[float] = field(default_factory=list)
    tolerance: float | None = None


def main(arguments: Sequence[str]) -> None:
    """Run the command: exit status 0, or 2 with one sentence for an error that the user can correct."""
    torch.set_num_threads(1)
    run_subcommand(arguments, HELP, DesignOptions, run)


def run(arguments: Sequence[str]) -> list[str]:
    """Solve a design or weigh upgrades, write the files, and return the lines of the report."""
    options = parse(DesignOptions, [a for a in arguments if not a.startswith(FOLDER)])
    either = bool(options.design) != bool(options.plan)
    require(either, "design or plan", "be given, and not both", "design=buyers")
    out = run_folder(arguments)
    lines = upgrade_lines(options.plan, out) if options.plan else design_lines(options, out)
    return [*lines, f"files: {out}"]


def design_lines(options: DesignOptions, out: Path) -> list[str]:
    """Solve a design, write its files, and return the lines of the report."""
    changes = {key: value for key in CHANGES if (value := getattr(options, key)) not in (None, [])}
    design = read_design(options.design, Path(options.folder) if options.folder else None, changes)
    designer = Designer(design)
    answer = designer.solve(design.budget) if design.budget else designer.reach(design.target)
    steps = [
        {"iteration_time_s": best}
        | {f"share/{n}": c / sum(costs.values()) for n, c in costs.items()}
        for costs, best in designer.history
    ]
    budgets = [factor * answer.budget for factor in design.budgets]
    front = [
        answer if budget == answer.budget else designer.solve(budget)
        for budget in budgets
        if budget >= designer.least
    ]
    plans = plan_files(answer)
    found = design_dict(design, answer, plans)
    out.mkdir(parents=True, exist_ok=True)
    for file, content in {**plans, "design.json": found}.items():
        write_json(out / file, content)
    header = [*FRONT, "option", *(f"factor {name}" for name in answer.knobs)]
    rows = [
        [*(getattr(a, key) for key in FRONT), a.option.name, *a.factors.values()] for a in front
    ]
    write_text(out / "pareto.csv", csv_text(header, rows))
    points = [
        (each.budget, {"iteration_time_s": each.iteration_time_s, "raw_gap": None})
        for each in front
    ]
    write_sweep_curve(out / "pareto.png", f"budget, {design.unit}", points)
    write_scalars(out / "tensorboard", steps)
    return report_lines(answer, found)


def plan_files(answer: Answer) -> dict[str, dict[str, Any]]:
    """Return by file name every job's plan on the hardware found, even uniform and layer by layer.

    The planner keeps the chance of the whole job, the design that of one device: the better plan stands.
    """
    files = {}
    for job, own in enumerate(answer.plans):
        config = scaled_config(answer.option.problems[job], answer.factors)
        problem = Problem.from_config(config)
        layerwise = Problem.from_config(
            replace(config, space=replace(config.space, kind="layerwise"))
        )
        planned, number = plan(layerwise), f"_{job + 1}" if job else ""
        even, cost = evaluate(own, problem), evaluate(planned.plan, layerwise)
        files[f"plan{number}.json"] = found = plan_dict(Outcome(problem, own, even))
        if even.iteration_time_s >= cost.iteration_time_s:
            found = plan_dict(
                Outcome(layerwise, planned.plan, cost, planned.result, planned.answers)
            )
        files[f"layerwise{number}.json"] = found
    return files


def design_dict(design: Design, answer: Answer, plans: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the content of `design.json`: SI units, money in the design's unit."""
    seconds, predicted = answer.iteration_time_s, [file["predicted"] for file in plans.values()]
    known = [p for p in predicted[::2] if "iteration_time_interval_s" in p]
    widest = max(
        (p["iteration_time_interval_s"][1] / p["iteration_time_s"] for p in known), default=0.0
    )
    layerwise = zip(design.weights, predicted[1::2], strict=True)
    return {
        "design": design.name,
        "unit": design.unit,
        "option": answer.option.name,
        "fixed": answer.option.fixed,
        "target_s": design.target or None,
        **{key: getattr(answer, key) for key in ANSWER},
        # fitted figures err together: jobs are as unsure as the least sure one
        "iteration_time_interval_s": [seconds / widest, seconds * widest] if widest else None,
        "layerwise_iteration_time_s": exp(
            sum(w * log(p["iteration_time_s"]) for w, p in layerwise)
        ),
        "bound_space": SPACE,
        "plan": next(iter(plans)),
        "plans": list(plans),
    }


def report_lines(answer: Answer, found: dict[str, Any]) -> list[str]:
    """Return the lines that the command prints."""
    seconds, interval = answer.iteration_time_s, found["iteration_time_interval_s"]
    unsure = f" ± {100 * (interval[1] / seconds - 1):.0f} %" if interval else ""
    lines = [
        f"{found['design']}: {seconds:.4g} s{unsure} an iteration on {answer.option.name} for "
        f"{answer.spent:,.0f} of {answer.budget:,.0f} {found['unit']}",
        f"no use of the budget is below {answer.bound_iteration_time_s:.4g} s (gap {100 * answer.gap:.3f} %; "
        f"{SPACE}); {answer.planner_calls} planner calls",
        f"planned layer by layer on this hardware: {found['layerwise_iteration_time_s']:.4g} s",
    ]
    saved = {n: f"{1e9 * s + 0.0:.3g}" for n, s in answer.seconds_saved_per_unit.items()}
    saved |= dict.fromkeys(answer.at_bound, "at its bound")
    rows = [
        (
            name,
            f"{answer.factors[name]:.4g}",
            f"{value:.4g}",
            f"{answer.costs[name]:,.0f}",
            saved[name],
        )
        for name, value in answer.knobs.items()
    ]
    return [
        *lines,
        *markdown_table(("figure", "factor", "value", "costs", "a million more saves, ms"), rows),
    ]


def upgrade_lines(path: str, out: Path) -> list[str]:
    """Write what upgrades of a plan's own cluster are worth, and return the lines of the report."""
    problem = Problem.from_config(required_config(path))
    given = read_plan(path, problem.model)
    seconds, found = evaluate(given, problem).iteration_time_s, upgrades(given, problem)
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "upgrades.json", found)
    kinds = {
        "figure": "",
        "before": ".4g",
        "to": "",
        "after": ".4g",
        "saved": ".2%",
        "replanned": ".2%",
    }
    rows = [tuple(format(row[key], kind) for key, kind in kinds.items()) for row in found]
    header = ("figure", "now", "upgrade", "then", "this plan saves", "planned anew saves")
    told = f"{path}: {seconds:.4g} s an iteration; planned anew: among even uniform plans"
    return [told, *markdown_table(header, rows, (0, 2))]
