"""Iteration time of a synchronous pipeline from its stage times.

1F1B (PipeDream-Flush, Narayanan et al. 2021): with stage times t_k per micro-batch and m
micro-batches, the first crosses all stages and the others follow at the pace of the slowest:
`sum_k t_k + (m - 1) max_k t_k`. `simulation.py` is its referee.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from darts_parallel.config import CostConfig
from darts_parallel.schedules import CLOSED_FORM, SEARCHED, full_name, usual_schedule


@dataclass(frozen=True)
class PipelineModel:
    """How the seconds of the stages make an iteration; the values of `CostConfig`."""

    simulated: bool = False
    schedule: str = "1f1b"
    blocking: bool = True
    """Messages between stages occupy the later stage."""
    together: bool = False
    """Gradients are synchronised once all devices have ended, as in the closed form; else each
    at its end."""
    free: bool = False
    """The order of the passes may be changed (`space.schedules` lists `searched`)."""
    start: bool = False
    """The schedule is where a search of orders begins; `space.schedules` does not list it."""

    @staticmethod
    def from_config(
        config: CostConfig,
        virtual_stages: int = 1,
        schedule: str | None = None,
        named: Sequence[str] = (),
    ) -> "PipelineModel":
        """Return the model that the user chose.

        Args:
            schedule: Of the plan; None takes `config.schedule`, or `interleaved` for several stages
                a device.
        """
        usual = usual_schedule(virtual_stages)
        name = full_name(schedule or (config.schedule if virtual_stages == 1 else usual))
        closed = config.pipeline == "closed_form"
        simulated = not closed or name != CLOSED_FORM
        # next to the closed form of 1F1B, so that plans differ by their passes alone
        together = closed and simulated and name == usual
        free = SEARCHED in named
        start = free and name not in named
        blocking = config.p2p == "blocking"
        return PipelineModel(simulated, name, blocking, together, free, start)


def pipeline_seconds(
    stage_seconds: Tensor, num_micro_batches: Tensor, slowest: Tensor | None = None
) -> Tensor:
    """Return the seconds of all micro-batches through the pipeline.

    Args:
        stage_seconds: Forward and backward seconds of one micro-batch, shape `(..., K)`.
        num_micro_batches: Shape broadcastable to `(...)`.
        slowest: Maximum over stages, shape `(...)`; given where a smooth maximum is wanted.

    Returns:
        Seconds, shape `(...)`.
    """
    bottleneck = stage_seconds.amax(-1) if slowest is None else slowest
    return stage_seconds.sum(-1) + (num_micro_batches - 1) * bottleneck


def by_device(values: Tensor, devices: Tensor, pp: int) -> Tensor:
    """Return the sums over the stages of every device, `(..., K)` to `(..., pp)`; `devices` is `(K,)`."""
    if len(devices) == pp:
        return values
    return values.new_zeros(*values.shape[:-1], pp).index_add(-1, devices, values)


def summed(values: Tensor, places: Tensor, count: int) -> Tensor:
    """Return values `(B, N)` added up by their place, shape `(B, count)`."""
    return values.new_zeros(len(values), count).scatter_add(1, places, values)
