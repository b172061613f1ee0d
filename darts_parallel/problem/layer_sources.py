"""Sources of blocks that no key of the model describes: who captures a block registers here."""

from collections.abc import Callable

from darts_parallel.config import Config
from darts_parallel.errors import UnsupportedError
from darts_parallel.problem.cluster import Cluster
from darts_parallel.problem.layer_spec import LayerSpec
from darts_parallel.problem.measured_times import MeasuredTimes

LAYER_SOURCES: dict[str, Callable[[Config, Cluster], tuple[LayerSpec, MeasuredTimes]]] = {}
"""Sources by the key of the model that asks for them: they return the block and its seconds and
bytes."""


def captured_block(config: Config, cluster: Cluster) -> tuple[LayerSpec, MeasuredTimes] | None:
    """Return the block that a source describes; None where the model's keys do.

    Errors:
        UnsupportedError: a setting of the job that no source serves.
    """
    for key, source in LAYER_SOURCES.items():
        if getattr(config.model, key) is not None:
            given = {"cost": config.cost.name, "training.lora_rank": config.training.lora_rank}
            for name, near in (("cost", "analytic"), ("training.lora_rank", 0)):
                if given[name] != near:
                    raise UnsupportedError(
                        f"{name}={given[name]} cannot price blocks of model.{key}; try {name}={near}."
                    )
            return source(config, cluster)
    return None
