"""`darts-parallel price`: a priced plan against the best one of its space."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from darts_parallel.cli._trainers import start_command
from darts_parallel.config import Config, SpaceConfig, given_values, require
from darts_parallel.cost import evaluate
from darts_parallel.errors import Entries, InfeasibleError
from darts_parallel.planner import plan as find_plan
from darts_parallel.plans import Plan, write_json
from darts_parallel.problem import Problem
from darts_parallel.report import Outcome, claim, fits_label, plan_dict
from darts_parallel.report import seconds as seconds_label

OF_PLANS = ("pp", "cp", "virtual_stages", "num_micro_batches")
"""Keys of the space that are fields of a plan; others are fields of its layers."""


def require_agreement(plan: Plan, config: Config, overrides: Sequence[str]) -> None:
    """Refuse keys of the space that name other values than the plan of `config.plan` has.

    Args:
        overrides: Of the command; keys that stand in the plan's file alone are not looked at.

    Errors:
        ConfigError: names key and value, and the value of the plan.
    """
    own = {key: {getattr(plan, key)} for key in OF_PLANS}
    for layer in plan.layers:
        batch = config.training.global_batch_size // (layer.dp * plan.num_micro_batches)
        for key, value in {**asdict(layer), "micro_batch_size": batch}.items():
            own.setdefault(key, set()).add(value)
    for key, value in given_values(overrides).items():
        name = key.removeprefix("space.")
        pinned = config.space.pinned(name) if name != key and name in own else None
        if pinned is not None:
            rule = f"be {', '.join(map(str, sorted(own[name])))} as in plan={config.plan}"
            near = f"leaving {key} out of the command, or degrees without a plan's file"
            require(own[name] <= {*pinned}, f"{key}={value}", rule, near)


def distance_to_best(outcome: Outcome, folder: Path) -> tuple[Entries, list[str]]:
    """Plan the job of a priced plan; pinned degrees are freed within the trainer's space.

    Writes `plan_best.json`; returns what `plan.json` says of it, and lines for the report.
    """
    problem = outcome.problem
    cost = outcome.cost
    sure = outcome.sure
    own = problem.config
    file = folder / "plan_best.json"
    space = own.space
    if space.pins:
        space = SpaceConfig(trainer=space.trainer, executable=space.executable)
    search = replace(own.search, method="auto")
    free = replace(own, price=False, plan=None, export=None, space=space, search=search)
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
    near = ""
    if sure is not None:
        near = "≈ " * sure.indistinguishable(cost.iteration_time_s, best.iteration_time_s)
        if extra < 0.0 and sure.any_out_of_memory > space.out_of_memory:
            fits = fits_label(sure.any_out_of_memory)
            wished = fits_label(space.out_of_memory)
            way += f", but it fits with {fits}, less than the {wished} asked for"
    entry = {
        "plan": file.name,
        "seconds": best.iteration_time_s,
        "chance": found.out_of_memory,
        "slower_by": share,
    }
    batch = problem.training.global_batch_size
    priced = (
        f"The priced plan is {near}{seconds_label(abs(extra))} ({100.0 * abs(share):.1f} %) {way}."
    )
    lines = [
        f"Best plan of the space: {found.plan.describe(batch)}",
        f"{seconds_label(best.iteration_time_s)} · fits: {fits_label(found.out_of_memory)}. {priced}",
        claim(tight, best, found.answers),
        f"the best: {start_command(tight, found.plan, file)}",
    ]
    return {"best": entry}, lines
