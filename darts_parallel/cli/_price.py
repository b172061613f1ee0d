"""`darts-parallel price`: a priced plan against the best one of its space."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from darts_parallel.cli._trainers import start_command
from darts_parallel.config import SpaceConfig
from darts_parallel.cost import CostBreakdown, evaluate
from darts_parallel.errors import InfeasibleError
from darts_parallel.planner import plan as find_plan
from darts_parallel.plans import write_json
from darts_parallel.problem import Problem
from darts_parallel.report import Outcome, claim, fits_label, plan_dict
from darts_parallel.report import seconds as seconds_label


def distance_to_best(
    problem: Problem, cost: CostBreakdown, folder: Path
) -> tuple[dict[str, Any], list[str]]:
    """Plan the job of a priced plan; pinned degrees are freed within the trainer's space.

    Writes `plan_best.json`; returns what `plan.json` says of it, and lines for the report.
    """
    own = problem.config
    file = folder / "plan_best.json"
    space = own.space
    if space.pins:
        space = SpaceConfig(trainer=space.trainer, executable=space.executable)
    free = replace(
        own, plan=None, export=None, space=space, search=replace(own.search, method="auto")
    )
    try:
        found = find_plan(Problem.from_config(free))
    except InfeasibleError:
        return {}, ["no plan of the space fits, so there is none to compare with."]
    tight = found.problem or problem
    best = evaluate(found.plan, tight)
    write_json(file, plan_dict(Outcome(tight, found.plan, best, found.result, found.answers)))
    extra = cost.iteration_time_s - best.iteration_time_s
    share = extra / best.iteration_time_s
    way = "slower" if extra >= 0.0 else "faster"
    entry = {
        "plan": file.name,
        "seconds": best.iteration_time_s,
        "chance": found.out_of_memory,
        "slower_by": share,
    }
    words = found.plan.describe(problem.training.global_batch_size)
    seconds = seconds_label(best.iteration_time_s)
    proof = claim(tight, best, found.answers)
    lines = [
        f"\nBest plan of the space: {words}",
        f"{seconds} · fits: {fits_label(found.out_of_memory)} · {proof}",
        f"The priced plan is {seconds_label(abs(extra))} ({100.0 * abs(share):.1f} %) {way}.",
        f"the best: {start_command(tight, found.plan, file)}",
    ]
    return {"best": entry}, lines
