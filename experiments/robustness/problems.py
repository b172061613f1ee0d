"""Random tiny problems, and whether the command's answer to each is true."""

import random
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from typing import Any

from darts_parallel.config.composition import load_config
from darts_parallel.config.schema import Config
from darts_parallel.cost.evaluation import evaluate
from darts_parallel.errors import ConfigError, DartsParallelError, InfeasibleError
from darts_parallel.planner import automatic
from darts_parallel.problem.problem import Problem
from experiments.robustness.oracle import TooManyError, cheapest

TOLERANCE = 1e-9
"""Relative; sums in another order differ by less."""


@dataclass(frozen=True)
class Verdict:
    """What became of one problem."""

    overrides: tuple[str, ...]
    outcome: str
    """`agreed`, `refused` (a sentence), `skipped` (too many plans), or what is wrong."""
    plans: int = 0
    """Priced by the oracle."""

    @property
    def wrong(self) -> bool:
        """Whether the command's answer is not true."""
        return self.outcome not in ("agreed", "refused", "skipped")


Settings = dict[str, Any]
"""Values by dotted key, `model`, `cluster`, `training` and `space` being groups."""


def random_settings(rng: random.Random) -> Settings:
    """A tiny problem: equal or mixed nodes of 1 to 4 GPUs, tight or loose memory, a few pins."""
    mixed = rng.random() < 0.3
    kind = rng.choice(["uniform", "stagewise", "layerwise"])
    heads = rng.choice([1, 2, 4, 8])
    settings: Settings = {
        "cluster": "toy_mixed" if mixed else "toy",
        "space.kind": kind,
        "model.num_layers": rng.choice([1, 2, 2, 3] if kind == "layerwise" else [1, 2, 3, 4]),
        "model.num_heads": heads,
        "model.hidden_size": heads * rng.choice([16, 24, 64, 128]),
        "model.vocab_size": rng.choice([128, 1000, 8192]),
        "model.tie_embeddings": rng.choice([True, False]),
        "training.global_batch_size": rng.choice([1, 2, 3, 4, 6, 8, 12]),
        "training.optimizer": rng.choice(["adam", "sgd"]),
        "cluster.inter_node.bandwidth_GBps": rng.choice([0.05, 1.0, 25.0, 400.0]),
    }
    for group in range(2 if mixed else 1):
        settings[f"cluster.nodes.{group}.count"] = rng.choice([1, 1, 2, 3])
        settings[f"cluster.nodes.{group}.gpus"] = rng.choice([1, 2, 2, 4])
    for device in ("toy", "toy_fast") if mixed else ("toy",):
        settings[f"cluster.devices.{device}.memory_GiB"] = rng.choice([0.012, 0.02, 0.05, 0.3, 1.0])
        settings[f"cluster.devices.{device}.reserved_GiB"] = 0.01
        settings[f"cluster.devices.{device}.overlap_exponent"] = rng.choice([1.0, 1.6, 8.0, 64.0])
    few = kind == "layerwise"
    pins: dict[str, list[Any]] = {
        "zero_stage": [[0, 3], [1], [0, 1, 2, 3]],
        "recompute": [["none", "full"], ["none"], ["none", "selective", "full"]],
        "sequence_parallel": [[False], [False, True]],
        "cp": [[1, 2], 1],
    }
    for key, values in pins.items():
        if few or rng.random() < 0.5:
            settings[f"space.{key}"] = rng.choice(values[:2] if few else values)
    return settings


def problem_of(settings: Settings) -> Problem:
    """The problem of these settings; groups are composed once, since that takes longer than solving."""
    config = deepcopy(_composed(settings["cluster"]))
    for key, value in settings.items():
        *path, last = key.split(".")
        if not path:
            continue
        place: Any = config
        for name in path:
            place = place[int(name)] if isinstance(place, list) else _entry(place, name)
        setattr(place, last, value)
    return Problem.from_config(config)


@cache
def _composed(cluster: str) -> Config:
    return load_config(["model=toy", "training=toy", f"cluster={cluster}"])


def _entry(place: Any, name: str) -> Any:
    return place[name] if isinstance(place, dict) else getattr(place, name)


def tried(settings: Settings, limit: int) -> Verdict:
    """The command's answer to a problem beside the oracle's."""
    name = tuple(f"{key}={value}" for key, value in settings.items())
    try:
        problem = problem_of(settings)
        best, plans = cheapest(problem, limit)
    except TooManyError:
        return Verdict(name, "skipped")
    except DartsParallelError:
        return Verdict(name, "refused")
    try:
        return Verdict(name, _compared(problem, best), plans)
    except ConfigError:
        return Verdict(name, "refused" if best == float("inf") else "refused although a plan fits", plans)
    except Exception as error:  # whatever else comes is what the attack looks for
        return Verdict(name, f"{type(error).__name__}: {error}", plans)


def _compared(problem: Problem, best: float) -> str:
    try:
        found, _ = automatic.attempt(problem)
    except InfeasibleError:
        return "agreed" if best == float("inf") else f"called infeasible, but a plan of {best} s fits"
    if found is None or found.result is None:
        return "refused"  # no proof within its time: nothing is claimed
    cost, claimed = evaluate(found.result.plan, problem), found.result.iteration_time_s
    if not cost.feasible or abs(cost.iteration_time_s - claimed) > TOLERANCE * claimed:
        return f"claims {claimed} s, and the plan takes {cost.iteration_time_s} s"
    if claimed > best * (1 + TOLERANCE):
        return f"called optimal at {claimed} s, but a plan of {best} s fits"
    if claimed < best * (1 - TOLERANCE):
        return f"found {claimed} s, below the oracle's {best} s"
    return "agreed"


def attack(count: int, seed: int, limit: int) -> list[Verdict]:
    """`count` random problems that have at most `limit` plans; the larger ones are drawn anew."""
    rng = random.Random(seed)
    verdicts: list[Verdict] = []
    while len(verdicts) < count:
        verdict = tried(random_settings(rng), limit)
        if verdict.outcome != "skipped":
            verdicts.append(verdict)
    return verdicts
