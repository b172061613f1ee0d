"""The plans that a bilevel plan is compared with."""

from collections.abc import Sequence

import torch

from darts_parallel.bilevel.candidates import Candidate
from darts_parallel.bilevel.time_model import TimeModel

RANDOM_PLANS = 4000


def fastest_plan(time: TimeModel, num_blocks: int, allowed: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """The plan of least predicted seconds among candidates: coordinate descent from every uniform plan.

    Args:
        time: Predicts seconds per step.
        num_blocks: Of the model.
        allowed: Candidates that a block may take.
    """
    best: tuple[float, tuple[Candidate, ...]] | None = None
    for start in allowed:
        plan, seconds = (start,) * num_blocks, float("inf")
        while True:
            trials = [(*plan[:i], c, *plan[i + 1 :]) for i in range(num_blocks) for c in allowed]
            values = time.plan_seconds(trials)
            if float(values.min()) >= seconds * (1.0 - 1e-12):
                break
            plan, seconds = trials[int(values.argmin())], float(values.min())
        if best is None or seconds < best[0]:
            best = (seconds, plan)
    assert best is not None
    return best[1]


def fastest_with_bits(time: TimeModel, num_blocks: int, bits: int) -> tuple[Candidate, ...]:
    """The fastest plan whose every all-reduce of a block runs at `bits`; groups of one rank send nothing."""

    def runs_at(candidate: Candidate) -> bool:
        tensor = candidate.tp == 1 or candidate.tp_comm_bits == bits
        return tensor and (candidate.dp == 1 or candidate.grad_comm_bits == bits)

    return fastest_plan(time, num_blocks, [c for c in time.choices.candidates if runs_at(c)])


def random_plan_of_equal_time(
    time: TimeModel, plan: Sequence[Candidate], generator: torch.Generator
) -> tuple[Candidate, ...]:
    """Of many random plans other than `plan`, the one whose predicted seconds are closest to its."""
    candidates = time.choices.candidates
    index = torch.randint(len(candidates), (RANDOM_PLANS, len(plan)), generator=generator).tolist()
    trials = [p for row in index if (p := tuple(candidates[i] for i in row)) != tuple(plan)]
    target = float(time.plan_seconds([plan])[0])
    return trials[int((time.plan_seconds(trials) / target).log().abs().argmin())]
