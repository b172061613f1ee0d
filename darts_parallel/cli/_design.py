"""`darts-parallel design`: the best use of a budget for hardware, and what one more dollar buys."""

import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from darts_parallel.config import error_sentence
from darts_parallel.cost import evaluate
from darts_parallel.design import FIGURES, Answer, Design, Designer, overrides_of, read_design
from darts_parallel.errors import ConfigError, begin_command
from darts_parallel.plan import write_json, write_text
from darts_parallel.problem import load_problem
from darts_parallel.report import csv_text, plan_dict

HELP = f"""\
darts-parallel design design=buyers [key=value ...]
finds the figures of the hardware that make an iteration shortest for a budget, with the plan on it, a proven
lower bound, what one more dollar saves at every figure, and the Pareto front over budgets.

  design=NAME              a file of conf/design or folder=FOLDER: knobs with prices, jobs, choices
  budget=14e6              in place of the file's; so are budgets=[0.8,1.25] and tolerance=0.001
  folder=FOLDER            where NAME.yaml lies
  hydra.run.dir=FOLDER     gets design.json, pareto.csv and plan.json (default: outputs/DATE/TIME)

Figures: {", ".join(FIGURES)}; nodes.1.FIGURE is that of one node group.
"""
SPACE = "even uniform plans of the jobs' spaces, all enumerated"
"""Space of the plans that the bound is about."""
CHANGED = ("budget", "budgets", "tolerance")


def main(arguments: Sequence[str]) -> None:
    """Run the command: exit status 0, or 2 with one sentence for an error that the user can correct."""
    begin_command()
    torch.set_num_threads(1)
    if not arguments or {"--help", "-h"} & set(arguments):
        print(HELP, end="")
        return
    try:
        for line in run_design(arguments):
            print(line)
    except KeyboardInterrupt:
        print("darts-parallel: interrupted before any design was found.", file=sys.stderr)
        raise SystemExit(2) from None
    except Exception as error:
        sentence = error_sentence(error, arguments)
        if sentence is None:
            raise
        print(f"darts-parallel: {' '.join(sentence.split())}", file=sys.stderr)
        raise SystemExit(2) from None


def run_design(arguments: Sequence[str]) -> list[str]:
    """Solve a design, write its files, and return the lines of the report.

    Errors:
        ConfigError: whatever breaks a rule, in one sentence.
    """
    values = _read(arguments)
    folder = values.get("folder")
    changes = {key: values[key] for key in CHANGED if key in values}
    design = read_design(str(values["design"]), None if folder is None else Path(str(folder)), changes)
    designer = Designer(design)
    answer = designer.solve(design.budget)
    front = [answer if budget == design.budget else designer.solve(budget)
             for budget in design.budgets if budget >= designer.least]  # fmt: skip
    out = Path(str(values.get("hydra.run.dir") or datetime.now().strftime("outputs/%Y-%m-%d/%H-%M-%S")))
    out.mkdir(parents=True, exist_ok=True)
    files, rows = _write_plans(answer, out), front_rows(front)
    write_json(out / "design.json", design_dict(design, answer, files))
    write_text(out / "pareto.csv", csv_text(list(rows[0]), (list(row.values()) for row in rows)))
    return [*report_lines(design, answer), f"design: {out / 'design.json'}", f"front: {out / 'pareto.csv'}",
            *(f"plan: {out / file}" for file in files)]  # fmt: skip


def _read(arguments: Sequence[str]) -> dict[str, Any]:
    """Return the values of `key=value` arguments."""
    keys = ("design", "folder", *CHANGED, "hydra.run.dir")
    values = {}
    for argument in arguments:
        key, equals, text = argument.partition("=")
        if not equals or key not in keys:
            raise ConfigError(
                f"{argument} is not a key of darts-parallel design; try one of {', '.join(keys)}."
            )
        try:
            values[key] = text if key == "hydra.run.dir" else OmegaConf.create(f"value: {text}").value
        except (OmegaConfBaseException, ValueError):
            raise ConfigError(f"{argument} cannot be read; try {key}=value, lists in brackets.") from None
        if OmegaConf.is_config(values[key]):
            values[key] = OmegaConf.to_container(values[key])
    if not values.get("design"):
        raise ConfigError("design must be given; try design=buyers.")
    return values


def _write_plans(answer: Answer, folder: Path) -> list[str]:
    """Write the plan of every job on the cluster of the answer, and return the names of the files."""
    files = []
    for job, (plan, problem) in enumerate(zip(answer.plans, answer.option.problems, strict=True)):
        given = [*answer.option.overrides[job], *overrides_of(problem, answer.factors)]
        changed = load_problem(given)
        files.append("plan.json" if job == 0 else f"plan_{job + 1}.json")
        write_json(folder / files[-1], plan_dict(changed, plan, evaluate(plan, changed), None, []))
    return files


def design_dict(design: Design, answer: Answer, files: Sequence[str]) -> dict[str, Any]:
    """Return the content of `design.json`: SI units, money in the design's unit."""
    worth = answer.worth()
    geometric = answer.iteration_time_s
    return {
        "design": design.name,
        "unit": design.unit,
        "option": answer.option.name,
        "knobs": {knob.name: knob.reference * answer.factors[knob.name] for knob in answer.option.knobs},
        "factors": answer.factors,
        "costs": answer.costs,
        "fixed": answer.option.fixed,
        "spent": answer.spent,
        "budget": answer.budget,
        "iteration_time_s": geometric,
        "job_iteration_times_s": list(answer.seconds),
        "bound_iteration_time_s": answer.bound_iteration_time_s,
        "bound_space": SPACE,
        "gap": answer.gap,
        "planner_calls": answer.calls,
        "slope_passes": answer.slope_passes,
        "elasticities": answer.elasticities,
        "seconds_saved_per_unit": {name: share * geometric for name, share in worth.items()},
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


def report_lines(design: Design, answer: Answer) -> list[str]:
    """Return the lines that the command prints."""
    worth = answer.worth()
    lines = [
        f"{design.name}: {answer.iteration_time_s:.4g} s an iteration on {answer.option.name} for "
        f"{answer.spent:,.0f} of {answer.budget:,.0f} {design.unit}",
        f"no use of the budget is below {answer.bound_iteration_time_s:.4g} s (gap {100 * answer.gap:.3f} %; "
        f"{SPACE}); {answer.calls} planner calls",
    ]
    for knob in answer.option.knobs:
        name = knob.name
        saved = 1e6 * worth[name] * answer.iteration_time_s * 1e3
        lines.append(
            f"  {name:<28} x {answer.factors[name]:<8.4g} = {knob.reference * answer.factors[name]:<10.4g} "
            f"costs {answer.costs[name]:>13,.0f}; a million more saves {saved:.3g} ms"
        )
    return lines
