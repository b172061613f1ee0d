"""Force every split of an operator, and compare the file of that plan with one process."""

import random
from collections.abc import Iterator, Sequence
from functools import partial

from darts_parallel.graph.verify import FileRun, collectives_on_gloo, run_file
from darts_parallel.run.workers import Workers
from tests.fuzz.case import FuzzCase, FuzzOutcome
from tests.graph.operator_calls import CALLS, made
from tests.graph.running import captured, forced_plans

KIND = "splits of operators"
CLOSE = 1e-4
"""Largest difference over the largest entry: above reordered sums in float32."""


def cases(count: int, seed: int) -> Iterator[FuzzCase]:
    """Yield calls of operators in a random order, each with all splits that its rule offers."""
    names = list(CALLS)
    random.Random(seed).shuffle(names)
    if count:
        with Workers(2, timeout_s=120.0) as workers:
            for name in names[:count]:
                yield KIND, partial(judge, workers, name)


def judge(workers: Workers, name: str) -> FuzzOutcome:
    """Run all splits of one call on two processes, forward and backward."""
    make = partial(made, name)
    plans = list(forced_plans(captured(make), 2))
    texts = [plan.text for plan in plans]
    for runs in workers.run(run_files, name, texts, (2,)):
        for plan, run in zip(plans, runs, strict=True):
            wrong = {key: value for key, value in run.differences.items() if not value < CLOSE}
            if wrong:
                return FuzzOutcome(f"{name} split by {plan.label}", f"differs: {wrong}", len(plans))
            if run.collectives != collectives_on_gloo(plan.plan):
                return FuzzOutcome(f"{name} split by {plan.label}", "other collectives", len(plans))
    return FuzzOutcome(name, "agreed", len(plans))


def run_files(name: str, texts: Sequence[str], ranks: tuple[int, ...]) -> list[FileRun]:
    """Run the files of one call's plans in this process."""
    return [run_file(partial(made, name), text, ranks) for text in texts]
