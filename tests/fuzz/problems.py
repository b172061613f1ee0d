"""Draw random tiny problems, and judge whether the command's answer to each is true."""

import random
from collections.abc import Iterator
from copy import deepcopy
from functools import cache, partial
from typing import Any

from darts_parallel.config.composition import load_config
from darts_parallel.config.schema import Config
from darts_parallel.cost.evaluation import evaluate
from darts_parallel.errors import ConfigError, DartsParallelError, InfeasibleError
from darts_parallel.export import refusals, require_trainers
from darts_parallel.planner import plan
from darts_parallel.plans.strategy import Plan
from darts_parallel.problem.problem import Problem
from darts_parallel.schedules import NAMES
from tests.fuzz.case import FuzzCase, FuzzOutcome
from tests.fuzz.oracle import TooManyError, cheapest

TOLERANCE = 1e-9
"""Relative difference that is rounding: sums in another order differ by less."""
PATIENCE_S = 600.0  # for a proof: how busy the machine is must not decide what is claimed

TRAINERS = ("megatron", "deepspeed", "accelerate", "galvatron", "torch", "torchtitan")
Settings = dict[str, Any]
"""Values by dotted key, `model`, `cluster`, `training` and `space` being groups."""


def random_settings(rng: random.Random) -> Settings:
    """Draw a tiny problem: equal or mixed nodes of 1 to 4 GPUs, tight or loose memory, a few pins."""
    mixed = rng.random() < 0.3
    trainer = rng.choice(TRAINERS) if rng.random() < 0.3 else None
    kind = "uniform" if trainer else rng.choice(["uniform", "stagewise", "layerwise"])
    heads = rng.choice([1, 2, 4, 8])
    settings: Settings = {
        "cluster": "toy_mixed" if mixed else "toy",
        "space.kind": kind,
        "space.trainer": trainer,
        "space.virtual_stages": rng.choice([1, 1, None, [1, 2]]),
        "model.num_layers": rng.choice([1, 1, 2] if kind == "layerwise" else [1, 2, 3, 4]),
        "model.num_heads": heads,
        "model.hidden_size": heads * rng.choice([16, 24, 64, 128]),
        "model.vocab_size": rng.choice([128, 1000, 8192]),
        "model.tie_embeddings": rng.choice([True, False]),
        "training.global_batch_size": rng.choice([1, 2, 3, 4, 6, 8, 12]),
        "training.optimizer": rng.choice(["adam", "sgd"]),
        "search.exact_seconds": PATIENCE_S,
        "search.max_seconds": PATIENCE_S,
        "cluster.inter_node.bandwidth_GBps": rng.choice([0.05, 1.0, 25.0, 400.0]),
    }
    for group in range(2 if mixed else 1):
        settings[f"cluster.nodes.{group}.count"] = rng.choice(
            [1, 1, 2] + [3] * (kind != "layerwise")
        )
        settings[f"cluster.nodes.{group}.gpus"] = rng.choice(
            [1, 2] if kind == "layerwise" else [1, 2, 2, 4]
        )
    for device in ("toy", "toy_fast") if mixed else ("toy",):
        settings[f"cluster.devices.{device}.memory_GiB"] = rng.choice([0.012, 0.02, 0.05, 0.3, 1.0])
        settings[f"cluster.devices.{device}.reserved_GiB"] = 0.01
        settings[f"cluster.devices.{device}.overlap_exponent"] = rng.choice([1.0, 1.6, 8.0, 64.0])
    few = kind == "layerwise"
    pins: dict[str, list[Any]] = {
        "zero_stage": [[0, 3], [1], [0, 1, 2, 3]],
        "recompute": [["none", "full"], ["none"], ["none", "selective", "full"]],
        "sequence_parallel": [[False], [False, True]],
        "cp": [1, [1, 2]],
        "pp": [[1, 2], [2], [1], [1, 4]],
    }
    for key, values in pins.items():
        if few or rng.random() < 0.5:
            settings[f"space.{key}"] = rng.choice(values[:2] if few else values)
    settings["model"] = rng.choice(["toy", "toy", "toy_moe"])
    settings["search.method"] = rng.choice(["exact", "exact", "auto", "gradient"])
    if rng.random() < 0.4:
        settings["cost.pipeline"] = "simulated"
        if rng.random() < 0.8:
            settings["space.schedules"] = rng.sample(NAMES, rng.choice([1, 2, 3]))
    elif rng.random() < 0.15:
        settings["space.offload"] = rng.sample(["activation", "optimizer"], rng.choice([1, 2]))
    if rng.random() < 0.15:
        settings["space.cut"] = "half_block"
    several = settings["space.virtual_stages"] != 1 or "interleaved" in settings.get(
        "space.schedules", ()
    )
    if kind == "uniform" and several and settings["search.method"] == "exact":
        settings["search.method"] = (
            "auto"  # alone it proves equal chunks, as it says, and all are enumerated
        )
    for value in settings.values():
        if isinstance(value, list):
            rng.shuffle(value)  # the order of a list means nothing
    return {
        key: list(value) if isinstance(value, list) else value for key, value in settings.items()
    }


def problem_of(settings: Settings) -> Problem:
    """Build the problem; groups are composed once, since that takes longer than solving."""
    config = deepcopy(_composed(settings["cluster"], settings.get("model", "toy")))
    for key, value in settings.items():
        *path, last = key.split(".")
        place: Any = config
        for name in path:
            if isinstance(place, (list, dict)):
                place = place[int(name) if isinstance(place, list) else name]
            else:
                place = getattr(place, name)
        if path:
            setattr(place, last, value)
    config.space.__post_init__()  # what a trainer means for the others
    return Problem.from_config(config)


@cache
def _composed(cluster: str, model: str) -> Config:
    # the oracle knows the median of the memory alone
    quick = ["search.num_steps=3", "search.num_restarts=1", "space.out_of_memory=0.5"]
    return load_config([f"model={model}", "training=toy", f"cluster={cluster}", *quick])


def judge(settings: Settings, limit: int) -> FuzzOutcome:
    """Compare the exact methods' answer with the oracle's; `skipped` beyond the limit of plans."""
    name = " ".join(f"{key}={value}".replace(" ", "") for key, value in settings.items())
    try:
        problem = problem_of(settings)
        require_trainers(problem)
        best, plans = cheapest(problem, limit)
    except (TooManyError, DartsParallelError):  # too large, or values that break a rule
        return FuzzOutcome(name, "skipped")
    if not plans:  # pins that leave nothing
        return FuzzOutcome(name, "skipped")
    try:
        return FuzzOutcome(name, answered(problem, best), plans)
    except ConfigError:
        return FuzzOutcome(
            name, "refused" if best == float("inf") else "refused although a plan fits", plans
        )
    except Exception as error:  # any other error is what this test looks for
        return FuzzOutcome(name, f"{type(error).__name__}: {error}", plans)


def answered(problem: Problem, best: float) -> str:
    """Ask the command's methods in their order, and judge what they say of the best plan."""
    kind = problem.config.space.kind
    try:
        found = plan(problem)
    except InfeasibleError as error:
        return "refused" if " that was found" in str(error) else compare(float("inf"), best)
    except ConfigError as error:  # no exact method reaches, or no time for it
        if "search.method=exact has no plan" in str(error):
            return "refused"
        raise
    answers = [answer for answer in found.answers if answer.space == kind]
    floor = max((answer.lower_bound_s for answer in answers), default=0.0)
    claimed = found.result.iteration_time_s
    proven = [x.iteration_time_s for x in answers if x.proven]
    if floor > best * (1 + TOLERANCE):
        return f"proves a bound of {floor} s, but a plan of {best} s fits"
    trainer = problem.config.space.trainer
    if not found.plan.within(kind) or (trainer and refusals(problem, found.plan, trainer)):
        return f"returns a plan that is not {kind}, or that {trainer} refuses"
    search = problem.config.search
    # an exact search reports the optimum, any other one a simpler plan of nearly equal seconds
    tie = TOLERANCE if search.method == "exact" else search.tie
    if proven and claimed > best * (1.0 + tie) and min(proven) <= best * (1.0 + TOLERANCE):
        return f"returns {claimed} s, far above its own proven {min(proven)} s"
    said = [
        compare(seconds, best, problem) for seconds in proven
    ]  # the plan itself may be a simpler one
    return next(
        (word for word in said if word != "agreed"),
        compare(claimed, best, problem, found.plan, proven=False),
    )


def compare(
    claimed: float,
    best: float,
    problem: Problem | None = None,
    given: Plan | None = None,
    *,
    proven: bool = True,
) -> str:
    """Compare a claim with the truth; infinite says that no plan fits."""
    if problem is not None and given is not None:
        cost = evaluate(given, problem)
        if not cost.feasible or abs(cost.iteration_time_s - claimed) > TOLERANCE * claimed:
            return f"claims {claimed} s, and the plan takes {cost.iteration_time_s} s"
    if claimed == best == float("inf"):
        return "agreed"
    if claimed == float("inf"):
        return f"called infeasible, but a plan of {best} s fits"
    if proven and claimed > best * (1 + TOLERANCE):
        return f"called optimal at {claimed} s, but a plan of {best} s fits"
    if problem is not None and problem.config.space.offload:
        return "agreed"  # host memory makes room for faster plans
    if claimed < best * (1 - TOLERANCE):
        return f"found {claimed} s, below the oracle's {best} s"
    return "agreed"


def drawn(seed: int, number: int, limit: int) -> FuzzOutcome:
    """Judge one random problem with at most `limit` plans; larger ones are drawn again."""
    rng = random.Random(f"{seed}/{number}")
    while (outcome := judge(random_settings(rng), limit)).outcome == "skipped":
        pass
    return outcome


def cases(count: int, seed: int, limit: int) -> Iterator[FuzzCase]:
    """Yield `count` random problems, each of its own seed, so that any one of them can be repeated."""
    for number in range(count):
        yield "random problems", partial(drawn, seed, number, limit)
