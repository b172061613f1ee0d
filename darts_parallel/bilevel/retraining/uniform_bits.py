"""The rival without any loop: one pair of bits for all blocks, chosen by training with every pair.

Selection has seeds of its own, so that the pair that is compared was not chosen for its luck.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from statistics import mean

from darts_parallel.bilevel.candidates import Candidate
from darts_parallel.bilevel.retraining.trainings import Training, Trainings
from darts_parallel.bilevel.settings import BilevelSettings
from darts_parallel.bilevel.upper.found import BilevelPlan, fixed_bits_optimum
from darts_parallel.bilevel.upper.joint_space import JointSpace
from darts_parallel.bilevel.upper.rivals import bits_of

FIRST_SELECTION_SEED = 200_000
"""Seeds of the selection lie above those of the retraining."""
SLACK = 1.1
"""A pair is trained until it cannot beat 16 bits by this factor of luck."""


@dataclass(frozen=True)
class UniformChoice:
    """The best pair of bits by training, and what finding it cost."""

    plan: BilevelPlan
    steps: int
    """Weight steps of all trainings, references included."""


def uniform_plans(space: JointSpace, batch: int, budget: float) -> list[BilevelPlan]:
    """The fastest plan of every pair of bits; none that another with as many bits or more is as fast as.

    Args:
        space: Priced plans.
        batch: Global batch size.
        budget: Seconds of wall-clock for each pair.
    """
    kept: dict[tuple[int, int], BilevelPlan] = {}
    for sums, sent in product(bits_of(space, "tp_comm_bits"), bits_of(space, "grad_comm_bits")):
        blocks = (Candidate(1, 1, sums, sent),) * space.num_blocks
        plan = fixed_bits_optimum(space, blocks, batch, budget)
        if plan is None:
            continue
        beaten = any(
            a >= sums and b >= sent and other.seconds <= plan.seconds * (1.0 + 1e-9)
            for (a, b), other in kept.items()
        )
        if not beaten:
            kept[sums, sent] = plan
    return list(kept.values())


def choose_uniform(
    space: JointSpace,
    settings: BilevelSettings,
    trainings: Trainings,
    on_done: Callable[[int, int], None] = lambda done, total: None,
) -> UniformChoice | None:
    """Train with every pair of bits and take the one of least mean time to target; None where none fits.

    Args:
        space: Priced plans.
        settings: Sizes, `retrain_steps`, `retrain_seeds`.
        trainings: Runs and keeps them.
        on_done: See `Trainings.run`.
    """
    batch = settings.global_batch_size
    plans = uniform_plans(space, batch, settings.exact_seconds)
    if not plans:
        return None
    seeds = [FIRST_SELECTION_SEED + index for index in range(settings.retrain_seeds)]
    references = trainings.references(seeds, settings)
    targets = {seed: run.final_loss for seed, run in zip(seeds, references, strict=True)}
    exact = next((p.seconds for p in plans if all(c.lossless for c in p.blocks)), None)
    wanted = [
        Training(plan.blocks, batch, seed, targets[seed], _factor(plan, exact, settings))
        for plan in plans
        for seed in seeds
    ]
    runs = trainings.run(wanted, settings, on_done)
    spent = sum(run.training[-1][0] for run in [*references, *runs])
    steps = iter(
        float("inf") if reached is None else reached
        for reached in (run.steps_to(own.target or 0.0) for run, own in zip(runs, wanted, strict=True))
    )
    times = [plan.seconds * mean(next(steps) for _ in seeds) for plan in plans]
    return UniformChoice(plans[times.index(min(times))], spent)


def _factor(plan: BilevelPlan, exact: float | None, settings: BilevelSettings) -> float:
    """How many times `retrain_steps` a plan may take before it has lost against 16 bits."""
    if exact is None:
        return settings.retrain_factor
    return min(max(SLACK * exact / plan.seconds, 1.0), settings.retrain_factor)
