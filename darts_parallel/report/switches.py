"""Switches of the run: which ones a price does not know, and what turning one on saves."""

from collections.abc import Iterator
from typing import Any

from darts_parallel.config import as_yaml
from darts_parallel.cost import evaluate
from darts_parallel.plans import Plan, facts, job_facts
from darts_parallel.problem import Problem

AVERAGED = ("attention_kernel", "tp_comm_overlap", "compiled")
"""Keys of `training` whose null stands for the average of the runs behind the figures."""
PRICED = (*AVERAGED, "cuda_graphs", "overlap_moe_expert_parallel_comm")
"""Keys of `training` that change seconds, and that a trainer's files can set."""
NOTABLE = 0.005
"""Share of the seconds from which on a saving is named."""


def averaged_switches(problem: Problem) -> Iterator[str]:
    """Yield a line on the switches that are not known, if any."""
    known = {**problem.software.runs, **problem.software.job}
    unknown = [key for key in AVERAGED if key not in known]
    if unknown and problem.config.cost.analytic:
        yield f"Not known, so averages of measured runs: {', '.join(unknown)}"


def switch_savings(problem: Problem, plan: Plan) -> Iterator[str]:
    """Yield a line for each switch of the trainer that would save time: this plan, priced again."""
    if not problem.config.cost.analytic:
        return
    usual = evaluate(plan, problem).iteration_time_s
    for key, values in problem.config.rules.switches.items():
        if key in PRICED:
            yield from _saving(problem, plan, key, values, usual)


def _saving(
    problem: Problem, plan: Plan, key: str, values: list[Any], usual: float
) -> Iterator[str]:
    """Yield the line of the value that saves most, if it saves a notable share."""
    best = usual * (1.0 - NOTABLE)
    releases = problem.config.rules.releases
    line = ""
    for value in values:
        changed = problem.with_training(**{key: value})
        if value == getattr(problem.training, key) or not _runs(changed, plan):
            continue
        seconds = evaluate(plan, changed).iteration_time_s
        if seconds < best:
            best = seconds
            saved = 100.0 * (1.0 - seconds / usual)
            line = f"training.{key}={as_yaml(value)} would save {saved:.1f} % of this plan's time"
            if value in releases:
                line += f" (from release {releases[value]} on)"
    if line:
        yield line


def _runs(problem: Problem, plan: Plan) -> bool:
    """Return whether the trainer runs a plan's strategies under the switches of the problem."""
    job = job_facts(problem.model, problem.training, problem.software)
    pipeline = (plan.pp, plan.cp, plan.schedule_name)
    given = [facts(job, *pipeline, own) for own in set(plan.layers)]
    return not any(lack.holds(one) for lack in problem.config.rules.lacks for one in given)
