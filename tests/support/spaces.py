"""Which space a hard plan belongs to."""

from darts_parallel.config.schema import SpaceConfig
from darts_parallel.cost.hard_plans import HardPlans


def is_in_space(plan: HardPlans, space: SpaceConfig) -> bool:
    """Whether one hard plan obeys `space.kind`."""
    if space.kind == "layerwise":
        return True
    if space.kind == "uniform":
        return bool((plan.choices == plan.choices[:, :1]).all())
    first = plan.choices.gather(1, plan.first_layers.gather(1, plan.stages()))
    return bool((plan.choices == first).all())
