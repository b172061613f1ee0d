"""Changes of a job that needs more memory than there is, each tried by a search of uniform plans."""

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from darts_parallel.config import EXPORTS, Config
from darts_parallel.cost import build_tables, without_dominated
from darts_parallel.errors import DartsParallelError
from darts_parallel.exact import find_uniform_plan
from darts_parallel.gradient import any_fits
from darts_parallel.planner.prediction_intervals import out_of_memory
from darts_parallel.problem import Problem

SECONDS = 3.0
"""Wall-clock seconds of all searches together."""
LORA_RANK = 16
TRAINER = "trainer"


def memory_offers(problem: Problem) -> Iterator[str]:
    """Yield changes with which some plan fits, with the seconds and the chance to fit of the fastest found.

    Only what the trainer of the space can write is tried; without one, what some trainer can.
    """
    deadline = time.monotonic() + SECONDS
    for words, group, changes in _changes(problem.config):
        if time.monotonic() > deadline:
            return
        try:
            if group == TRAINER:
                config = problem.config.for_trainer(**changes)
                parts = {"space": config.space, "training": config.training}
            else:
                parts = {group: replace(getattr(problem.config, group), **changes)}
            own = problem.with_config(**parts)
            tables = [without_dominated(table) for table in build_tables(own)]
        except DartsParallelError:  # another rule forbids the change
            continue
        # no exact method knows these costs
        if own.config.space.offload is not None or own.config.cost.pipeline == "simulated":
            if any_fits(tables, "uniform"):
                yield words
            continue
        found = find_uniform_plan(tables, deadline=deadline).best
        if found is not None:
            chance = out_of_memory(found.to_plan(tables), own) or 0.0
            yield f"{words} ({found.time:.2f} s, fits: {100 * (1 - chance):.0f} %)"


def _changes(config: Config) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield changes in words, the group, and its keys, the quickest to search first."""
    training, space = config.training, config.space
    rules = config.abilities(space.trainer) if space.trainer else None
    fused = rules is None or "fused" in rules.switches.get("loss", ())
    if training.loss != "fused" and fused:
        yield "training.loss=fused", "training", {"loss": "fused"}
    narrow = rules is None or "adam_8bit" in rules.switches.get("optimizer", ())
    if training.optimizer == "adam" and narrow:
        yield "training.optimizer=adam_8bit", "training", {"optimizer": "adam_8bit"}
    if not training.lora_rank and (rules is None or not rules.own_model):
        yield f"training.lora_rank={LORA_RANK}", "training", {"lora_rank": LORA_RANK}
    if 3 not in (space.pinned("zero_stage") or (3,)):
        yield "space.zero_stage=3", "space", {"zero_stage": 3}
    if space.cp == 1:
        yield "space.cp=null", "space", {"cp": None}
    if space.offload is None and config.search.method != "exact":
        for name in (space.trainer,) if space.trainer else EXPORTS:
            shares = dict.fromkeys(config.abilities(name).offloads, 1.0)
            words = ", ".join(f"{kind}: {share}" for kind, share in shares.items())
            changes = {"name": name, "kind": "uniform", "offload": shares}
            if shares:
                yield f"trainer={name} 'space.offload={{{words}}}'", TRAINER, changes
