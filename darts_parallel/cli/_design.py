"""`darts-parallel design`: the best use of a budget for hardware, and what one more dollar buys."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from math import exp, log
from pathlib import Path

import torch

from darts_parallel.config import (
    FOLDER,
    given_values,
    of_job,
    parse,
    require,
    run_folder,
    run_subcommand,
)
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
from darts_parallel.errors import Amounts, Entries
from darts_parallel.planner import plan
from darts_parallel.plans import read_own_problem, read_plan, write_json, write_text
from darts_parallel.problem import Problem
from darts_parallel.report import (
    Outcome,
    SearchCurves,
    csv_text,
    markdown_table,
    plan_dict,
)

HELP = f"""\
darts-parallel design design=buyers [key=value ...]
finds the figures of the hardware that make an iteration shortest for budget=, or the least budget for target=
seconds, with the plan on it, a proven lower bound, what one more dollar saves at every figure, and the Pareto
front over budgets. design= names a file of conf/design, or is an own YAML file, with knobs,
prices, jobs and choices. Words (tp=8, gbs=1024) and keys of model, training and space change all its jobs.

darts-parallel design design=plan.json
tells what 10 % more of each figure is worth to a plan, and the next product, without prices.

Figures: {", ".join(FIGURES)}; nodes.1.FIGURE is that of one node group.
Files go to hydra.run.dir=FOLDER, or else outputs/DATE/TIME.
Options, with their defaults:
"""
SPACE = "even uniform plans of the jobs' spaces, all enumerated"
"""Space that the bound is about."""
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
"""Parts of an answer under the same names in design.json."""
FRONT = ("budget", "spent", "iteration_time_s", "bound_iteration_time_s", "planner_calls")
"""Parts of an answer under the same names in pareto.csv."""
MACHINE_WORDS = ("cluster", "nodes", "gpus")
"""Words for the machine, which a design's file describes."""
UPGRADE_FORMATS = {
    "figure": "",
    "before": ".4g",
    "to": "",
    "after": ".4g",
    "saved": ".2%",
    "replanned": ".2%",
}
UPGRADE_HEADER = ("figure", "now", "upgrade", "then", "this plan saves", "planned again saves")


@dataclass
class DesignOptions:
    """Command line; what is given takes the place of the file's."""

    design: str = ""
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
    job = [one for one in arguments if of_job(one)]
    own = [one for one in arguments if not of_job(one) and not one.startswith(FOLDER)]
    for word, value in given_values(own).items():
        near = f"overrides: [{word}={value}] in options of the design's YAML file"
        require(word not in MACHINE_WORDS, f"{word}={value}", "be of a machine of the design", near)
    given = asdict(parse(DesignOptions, own))
    design = given.pop("design")
    rule = "name a design, its YAML file or a plan"
    require(bool(design), f"design={design}", rule, "design=buyers")
    changes = {key: value for key, value in given.items() if value not in (None, [])}
    is_plan = design.endswith(".json")
    rule = "be of a design, and not of a plan"
    refused = "+".join([*changes, *job])
    require(not is_plan or not refused, refused, rule, f"design={design} alone")
    out = run_folder(arguments)
    if is_plan:
        lines = upgrade_lines(design, out)
    else:
        lines = design_lines(read_design(design, changes, job), out)
    return [*lines, f"files: {out}"]


def design_lines(design: Design, out: Path) -> list[str]:
    """Solve a design, write its files, and return the lines of the report."""
    designer = Designer(design)
    answer = designer.solve(design.budget) if design.budget else designer.reach(design.target)
    steps = [_step(costs, best) for costs, best in designer.history]
    front = _front(designer, answer)
    plans = plan_files(answer)
    found = design_dict(design, answer, plans)
    out.mkdir(parents=True, exist_ok=True)
    for file, content in {**plans, "design.json": found}.items():
        write_json(out / file, content)
    write_text(out / "pareto.csv", _front_csv(front))
    curves = SearchCurves(out / "tensorboard")
    for step, scalars in enumerate(steps):
        curves.scalars(scalars, step)
    curves.writer.close()
    return report_lines(answer, found)


def _step(costs: Amounts, best: float) -> Amounts:
    """Return the scalars of one planner call: seconds, and shares of the money."""
    whole = sum(costs.values())
    shares = {f"share/{name}": cost / whole for name, cost in costs.items()}
    return {"iteration_time_s": best, **shares}


def _front(designer: Designer, answer: Answer) -> list[Answer]:
    """Return the answers over the budgets of the design that pay the least of every knob."""
    front = []
    for factor in designer.design.budgets:
        budget = factor * answer.budget
        if budget == answer.budget:
            front.append(answer)
        elif budget >= designer.least:
            front.append(designer.solve(budget))
    return front


def _front_csv(front: Sequence[Answer]) -> str:
    """Return the content of `pareto.csv`."""
    header = [*FRONT, "option", *(f"factor {name}" for name in front[0].knobs)]
    rows = []
    for own in front:
        figures = [getattr(own, key) for key in FRONT]
        rows.append([*figures, own.option.name, *own.factors.values()])
    return csv_text(header, rows)


def plan_files(answer: Answer) -> dict[str, Entries]:
    """Return by file name every job's plan on the hardware found, even uniform and layer by layer.

    The planner keeps the chance of the whole job, the design that of one device: the better plan
    stands.
    """
    files = {}
    for job, own in enumerate(answer.plans):
        number = f"_{job + 1}" if job else ""
        config = scaled_config(answer.option.problems[job], answer.factors)
        problem = Problem.from_config(config)
        layerwise = Problem.from_config(config.with_space(kind="layerwise"))
        planned = plan(layerwise)
        even = evaluate(own, problem)
        cost = evaluate(planned.plan, layerwise)
        found = plan_dict(Outcome(problem, own, even))
        files[f"plan{number}.json"] = found
        if even.iteration_time_s >= cost.iteration_time_s:
            known = (planned.result, planned.answers)
            found = plan_dict(Outcome(layerwise, planned.plan, cost, *known))
        files[f"layerwise{number}.json"] = found
    return files


def design_dict(design: Design, answer: Answer, plans: dict[str, Entries]) -> Entries:
    """Return the content of `design.json`: SI units, money in the design's unit."""
    predicted = [file["predicted"] for file in plans.values()]
    layerwise = zip(design.weights, predicted[1::2], strict=True)
    mean = sum(weight * log(own["iteration_time_s"]) for weight, own in layerwise)
    found: Entries = {"design": design.name, "unit": design.unit}
    found |= {"option": answer.option.name, "fixed": answer.option.fixed}
    found |= {"target_s": design.target or None}
    found |= {key: getattr(answer, key) for key in ANSWER}
    found["iteration_time_interval_s"] = _interval(answer.iteration_time_s, predicted[::2])
    found["layerwise_iteration_time_s"] = exp(mean)
    found["bound_space"] = SPACE
    return found | {"plan": next(iter(plans)), "plans": list(plans)}


def _interval(seconds: float, predicted: Sequence[Entries]) -> list[float] | None:
    """Return the interval of the jobs' mean seconds, as wide as the widest of a job.

    Calibrated figures err together, so that means are as unsure as the least sure job.
    """
    widths = [
        own["iteration_time_interval_s"][1] / own["iteration_time_s"]
        for own in predicted
        if "iteration_time_interval_s" in own
    ]
    return [seconds / max(widths), seconds * max(widths)] if widths else None


def report_lines(answer: Answer, found: Entries) -> list[str]:
    """Return the lines that the command prints."""
    seconds = answer.iteration_time_s
    interval = found["iteration_time_interval_s"]
    unsure = f" ± {100 * (interval[1] / seconds - 1):.0f} %" if interval else ""
    lines = [
        f"{found['design']}: {seconds:.4g} s{unsure} an iteration on {answer.option.name} for "
        f"{answer.spent:,.0f} of {answer.budget:,.0f} {found['unit']}",
        f"no use of the budget is below {answer.bound_iteration_time_s:.4g} s (gap {100 * answer.gap:.3f} %; "
        f"{SPACE}); {answer.planner_calls} planner calls",
        f"planned layer by layer on this hardware: {found['layerwise_iteration_time_s']:.4g} s",
    ]
    rows = []
    for name, value in answer.knobs.items():
        saved = f"{1e9 * answer.seconds_saved_per_unit[name] + 0.0:.3g}"
        if name in answer.at_bound:
            saved = "at its bound"
        factor = f"{answer.factors[name]:.4g}"
        cost = f"{answer.costs[name]:,.0f}"
        rows.append((name, factor, f"{value:.4g}", cost, saved))
    header = ("figure", "factor", "value", "costs", "a million more saves, ms")
    return [*lines, *markdown_table(header, rows)]


def upgrade_lines(path: str, out: Path) -> list[str]:
    """Write what upgrades of a plan's own cluster are worth, and return the lines of the report."""
    problem = read_own_problem(path)
    given = read_plan(path, problem.model)
    seconds = evaluate(given, problem).iteration_time_s
    found = upgrades(given, problem)
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "upgrades.json", found)
    rows = [tuple(format(row[key], kind) for key, kind in UPGRADE_FORMATS.items()) for row in found]
    told = f"{path}: {seconds:.4g} s an iteration; planned again: among even uniform plans"
    return [told, *markdown_table(UPGRADE_HEADER, rows, (0, 2))]
