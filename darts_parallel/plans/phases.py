"""Phases of a training: global batch sizes and plans by step, as `plan.json` lists them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from darts_parallel.errors import PlanError
from darts_parallel.plans._fields import Fields
from darts_parallel.plans.strategy import Plan

FIELD = "training_phases"
"""Field of `plan.json`."""


@dataclass(frozen=True)
class BatchPhase:
    """The steps from one on, all with one global batch size under one plan."""

    from_step: int
    global_batch_size: int
    plan: Plan

    @staticmethod
    def from_dict(data: Any) -> "BatchPhase":
        """Read an entry of `training_phases`.

        Errors:
            PlanError: a field is missing, of the wrong type, or illegal in itself.
        """
        plan = Plan.from_dict(data.get("plan") if isinstance(data, dict) else data)
        fields = Fields(data, f"{FIELD}.")
        step = fields.read("from_step", int, 0)
        return BatchPhase(step, fields.read("global_batch_size", int, 1), plan)

    @property
    def divided(self) -> tuple[Plan, float]:
        """Return the plan whatever its micro-batches, and the sequences of one on all ranks."""
        size = self.global_batch_size / self.plan.num_micro_batches
        return replace(self.plan, num_micro_batches=1), size


def phases_of(data: Any) -> list[BatchPhase]:
    """Read the phases of a `plan.json`; none where one batch size holds for the whole training.

    Errors:
        PlanError: an entry is broken, or steps do not rise from 0.
    """
    entries = Fields(data).read(FIELD, list) if FIELD in data else []
    phases = [BatchPhase.from_dict(entry) for entry in entries]
    steps = [phase.from_step for phase in phases]
    if steps and (steps[0] or any(first >= second for first, second in pairwise(steps))):
        raise PlanError(
            f"plan: {FIELD}.from_step={steps} must rise from 0; try {[*range(len(steps))]}."
        )
    return phases


def megatron_schedule(phases: Sequence[BatchPhase], tokens: int) -> str | None:
    """Return the value of Megatron-LM's `--step-batch-size-schedule`; None where it cannot follow.

    From 0.18 on Megatron-LM changes the batch after given numbers of tokens, under one plan and one size of
    micro-batches (StepBatchsizeNumMicroBatchesCalculator of its core).

    Args:
        tokens: Of a sequence.
    """
    if len(phases) < 2 or len({phase.divided for phase in phases}) > 1:
        return None
    start = 0
    parts = [f"0:{phases[0].global_batch_size}"]
    for before, phase in pairwise(phases):
        start += (phase.from_step - before.from_step) * before.global_batch_size * tokens
        parts.append(f"{start}:{phase.global_batch_size}")
    return " ".join(parts)
