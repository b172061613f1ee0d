"""`darts-parallel design`: the best use of a budget for hardware, and what one more dollar buys."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from math import exp, log
from pathlib import Path
from typing import Any

import torch

from darts_parallel.config import describe, guarded, parse
from darts_parallel.cost import CostBreakdown, evaluate
from darts_parallel.design import FIGURES, Answer, Design, Designer, overrides_of, read_design, upgrades
from darts_parallel.errors import ConfigError
from darts_parallel.plan import read_plan, required_config, write_json, write_text
from darts_parallel.planner import Planned, intervals, plan, time_elasticities
from darts_parallel.problem import Problem, load_problem
from darts_parallel.report import csv_text, markdown_table, plan_dict, write_scalars, write_sweep_curve

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
SPACE = "even uniform plans of the jobs' spaces, all enumerated"
"""Space of the plans that the bound is about."""
FOLDER = "hydra.run.dir"


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

    def work() -> int:
        if not arguments or {"--help", "-h"} & set(arguments):
            print(HELP + describe(DesignOptions))
            return 0
        given = dict(argument.partition("=")[::2] for argument in arguments)
        out = Path(given.pop(FOLDER, "") or datetime.now().strftime("outputs/%Y-%m-%d/%H-%M-%S"))
        options = parse(DesignOptions, [a for a in arguments if not a.startswith(FOLDER)])
        if bool(options.design) == bool(options.plan):
            raise ConfigError("design or plan must be given, and not both; try design=buyers.")
        lines = upgrade_lines(options.plan, out) if options.plan else run_design(options, out)
        print("\n".join([*lines, f"files: {out}"]))
        return 0

    if status := guarded("darts-parallel", work):
        raise SystemExit(status)


def run_design(options: DesignOptions, out: Path) -> list[str]:
    """Solve a design, write its files, and return the lines of the report.

    Errors:
        ConfigError: whatever breaks a rule, in one sentence.
    """
    changes = {key: value for key in ("budget", "target", "budgets", "tolerance")
               if (value := getattr(options, key)) not in (None, [])}  # fmt: skip
    design = read_design(options.design, Path(options.folder) if options.folder else None, changes)
    designer = Designer(design)
    answer = designer.solve(design.budget) if design.budget else designer.reach(design.target)
    steps = step_scalars(designer)
    budgets = [factor * answer.budget for factor in design.budgets]
    front = [answer if budget == answer.budget else designer.solve(budget)
             for budget in budgets if budget >= designer.least]  # fmt: skip
    finished = [_finish(answer, job) for job in range(len(answer.plans))]
    out.mkdir(parents=True, exist_ok=True)
    plans = plan_files(answer, finished)
    found, rows = design_dict(design, answer, finished, list(plans)), front_rows(front)
    for file, content in {**plans, "design.json": found}.items():
        write_json(out / file, content)
    write_text(out / "pareto.csv", csv_text(list(rows[0]), (list(row.values()) for row in rows)))
    points = [(row["budget"], {"iteration_time_s": row["iteration_time_s"], "raw_gap": None}) for row in rows]
    write_sweep_curve(out / "pareto.png", f"budget, {design.unit}", points)
    write_scalars(out / "tensorboard", steps)
    return report_lines(design, answer, found)


@dataclass(frozen=True)
class Finish:
    """One job on the hardware of the answer."""

    problem: Problem
    cost: CostBreakdown
    """Price of the answer's even uniform plan."""
    layerwise: Problem
    planned: Planned
    """As `darts-parallel` plans the job there, stages and layers as uneven as they like."""
    finished: CostBreakdown
    half_width: float | None
    """Half of the 80 % interval of the logarithm of the seconds; None where nothing is calibrated."""


def _finish(answer: Answer, job: int) -> Finish:
    """Plan a job layer by layer on the hardware that was found."""
    given = [*answer.option.overrides[job], *overrides_of(answer.option.problems[job], answer.factors)]
    problem, layerwise = load_problem(given), load_problem([*given, "space=layerwise"])
    cost, planned = evaluate(answer.plans[job], problem), plan(layerwise)
    known = intervals(answer.plans[job], problem, cost, time_elasticities(answer.plans[job], problem))
    width = None if known is None else known.half_width
    return Finish(problem, cost, layerwise, planned, evaluate(planned.plan, layerwise), width)


def plan_files(answer: Answer, finished: Sequence[Finish]) -> dict[str, dict[str, Any]]:
    """Return the plan of every job on the answer's hardware, even uniform and layer-wise, by file name."""
    files = {}
    for job, (own, end) in enumerate(zip(answer.plans, finished, strict=True), 1):
        number = "" if job == 1 else f"_{job}"
        files[f"plan{number}.json"] = plan_dict(end.problem, own, end.cost, None, [])
        files[f"layerwise{number}.json"] = plan_dict(
            end.layerwise, end.planned.plan, end.finished, end.planned.result, end.planned.answers
        )
    return files


def design_dict(
    design: Design, answer: Answer, finished: Sequence[Finish], files: Sequence[str]
) -> dict[str, Any]:
    """Return the content of `design.json`: SI units, money in the design's unit."""
    seconds = answer.iteration_time_s
    widths = [end.half_width for end in finished if end.half_width is not None]
    logs = zip(design.weights, finished, strict=True)
    return {
        "design": design.name,
        "unit": design.unit,
        "option": answer.option.name,
        "knobs": {name: bought.value for name, bought in answer.knobs.items()},
        "factors": answer.factors,
        "costs": {name: bought.cost for name, bought in answer.knobs.items()},
        "fixed": answer.option.fixed,
        "spent": answer.spent,
        "budget": answer.budget,
        "target_s": design.target or None,
        "iteration_time_s": seconds,
        # fitted figures err together: jobs are as unsure as the least sure one
        "iteration_time_interval_s": [seconds * exp(s * max(widths)) for s in (-1, 1)] if widths else None,
        "job_iteration_times_s": list(answer.seconds),
        "layerwise_iteration_time_s": exp(sum(w * log(end.finished.iteration_time_s) for w, end in logs)),
        "bound_iteration_time_s": answer.bound_iteration_time_s,
        "bound_space": SPACE,
        "gap": answer.gap,
        "planner_calls": answer.calls,
        "elasticities": {name: bought.elasticity for name, bought in answer.knobs.items()},
        "seconds_saved_per_unit": {name: bought.worth * seconds for name, bought in answer.knobs.items()},
        "plan": files[0],
        "plans": list(files),
    }


def front_rows(front: Sequence[Answer]) -> list[dict[str, Any]]:
    """Return the rows of `pareto.csv`, one a budget; factors of knobs are relative to their references."""
    return [
        {
            "budget": answer.budget,
            "spent": answer.spent,
            "iteration_time_s": answer.iteration_time_s,
            "bound_iteration_time_s": answer.bound_iteration_time_s,
            "planner_calls": answer.calls,
            "option": answer.option.name,
            **{f"factor {name}": factor for name, factor in answer.factors.items()},
        }
        for answer in front
    ]


def step_scalars(designer: Designer) -> list[dict[str, float]]:
    """Return what TensorBoard shows of every call: the best seconds so far and the shares of the money."""
    return [
        {"iteration_time_s": best}
        | {f"share/{name}": cost / sum(costs.values()) for name, cost in costs.items()}
        for _, costs, best in designer.history
    ]


def report_lines(design: Design, answer: Answer, found: dict[str, Any]) -> list[str]:
    """Return the lines that the command prints."""
    seconds, interval = answer.iteration_time_s, found["iteration_time_interval_s"]
    unsure = f" ± {100 * (interval[1] / seconds - 1):.0f} %" if interval else ""
    lines = [
        f"{design.name}: {seconds:.4g} s{unsure} an iteration on {answer.option.name} for "
        f"{answer.spent:,.0f} of {answer.budget:,.0f} {design.unit}",
        f"no use of the budget is below {answer.bound_iteration_time_s:.4g} s (gap {100 * answer.gap:.3f} %; "
        f"{SPACE}); {answer.calls} planner calls",
        f"planned layer by layer on this hardware: {found['layerwise_iteration_time_s']:.4g} s",
    ]
    rows = [
        (name, f"{bought.factor:.4g}", f"{bought.value:.4g}", f"{bought.cost:,.0f}",
         f"{1e9 * bought.worth * seconds:.3g}")
        for name, bought in answer.knobs.items()
    ]  # fmt: skip
    return [*lines, *markdown_table(("figure", "factor", "value", "costs", "a million more saves, ms"), rows)]


def upgrade_lines(path: str, out: Path) -> list[str]:
    """Write what upgrades of a plan's own cluster are worth, and return the lines of the report."""
    problem = Problem.from_config(required_config(path))
    given = read_plan(path, problem)
    seconds, found = evaluate(given, problem).iteration_time_s, upgrades(given, problem)
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "upgrades.json", [asdict(upgrade) for upgrade in found])
    rows = [
        (u.figure, f"{u.before:.4g}", u.to, f"{u.after:.4g}", f"{u.saved:.2%}", f"{u.replanned:.2%}")
        for u in found
    ]
    header = ("figure", "now", "upgrade", "then", "this plan saves", "planned anew saves")
    told = f"{path}: {seconds:.4g} s an iteration; planned anew: among even uniform plans"
    return [told, *markdown_table(header, rows, (0, 2))]
