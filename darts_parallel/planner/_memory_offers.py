"""Changes of a job that needs more memory than there is, each tried by a search of uniform plans."""

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from darts_parallel.config import NEWEST, Config, SpaceConfig
from darts_parallel.cost import build_tables, without_dominated
from darts_parallel.errors import DartsParallelError, Entries
from darts_parallel.gradient import any_fits
from darts_parallel.planner.result import Planned
from darts_parallel.problem import Problem, worth

SECONDS = 3.0
"""Wall-clock seconds of all searches together."""
LORA_RANK = 16
TRAINER = "trainer"
MORE_NODES = re.compile(r"\b(\d+) nodes( of \S+)? instead of \d+")


def with_offers(sentence: str, problem: Problem, find: Callable[[Problem], Planned]) -> str:
    """Return a sentence with changes with which some plan fits, each with seconds and the chance to fit.

    Only what the trainer of the space can write is tried; without one, what some trainer can. The
    seconds are a limit (`≤`) where more than uniform plans are searched, or time ends the search.

    Args:
        find: Plans a problem as the command does.
    """
    asked = problem.config
    space = asked.space
    deadline = time.monotonic() + SECONDS

    def priced(words: str, group: str, changes: Entries) -> str:
        left = deadline - time.monotonic()
        try:
            if group == TRAINER:
                config = asked.for_trainer(**changes)
            else:
                config = replace(asked, **{group: replace(getattr(asked, group), **changes)})
            method = "exact" if asked.search.method == "exact" else "auto"
            search = replace(asked.search, method=method, max_seconds=max(left, 0.1))
            limits: Entries = {"kind": "uniform"}
            if asked.price:  # its pinned degrees have no limit of their own
                limits["out_of_memory"] = min(space.out_of_memory, SpaceConfig.out_of_memory)
            uniform = replace(config, search=search).with_space(**limits)
            own = Problem.from_config(uniform)
            tables = build_tables(own.leaving_free(problem.headroom))
            if not any_fits([without_dominated(table) for table in tables], "uniform"):
                return ""
            # a search of simulated pipelines takes longer than there is
            if left <= 0.0 or asked.cost.pipeline == "simulated":
                return f"{words} (not searched)"
            found = find(own)
        except DartsParallelError:  # another rule forbids the change, or no plan was found
            return ""
        assert found.result  # it was searched
        limit = "≤ " if config.space.kind != "uniform" or found.result.stopped_by else ""
        seconds = found.result.iteration_time_s
        fits = f"fits: {100 * (1 - (found.out_of_memory or 0.0)):.0f} %"
        if found.warning:
            fits += f", less than the {100 * (1 - own.config.space.out_of_memory):.0f} % asked for"
        if not worth(asked.objective, own.cluster, seconds)[1]:
            fits += f", beyond the limit of objective={asked.objective.name}"
        return f"{words} ({limit}{seconds:.2f} s, {fits})"

    if more := MORE_NODES.search(sentence):
        first, *others = asked.cluster.nodes
        nodes = [replace(first, count=int(more[1])), *others]
        sentence = sentence.replace(
            more[0], priced(more[0], "cluster", {"nodes": nodes}) or more[0]
        )
    ways = (priced(*change) for change in _changes(asked))
    return " or ".join([sentence, *filter(None, ways)])


def _changes(config: Config) -> Iterator[tuple[str, str, Entries]]:
    """Yield changes in words, the group, and its keys, the quickest to search first."""
    training = config.training
    space = config.space
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
        for name in (space.trainer,) if space.trainer else NEWEST:
            shares = dict.fromkeys(config.abilities(name).offloads, 1.0)
            words = ", ".join(f"{kind}: {share}" for kind, share in shares.items())
            changes = {"name": name, "kind": "uniform", "offload": shares}
            if shares:
                yield f"trainer={name} 'space.offload={{{words}}}'", TRAINER, changes
