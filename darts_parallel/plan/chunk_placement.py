"""Which device holds which run of layers: in turn, or down and up again as a V."""

from difflib import get_close_matches

from darts_parallel.config.bilevel import ASYNCHRONOUS
from darts_parallel.config.schema import SCHEDULES, V_SHAPED
from darts_parallel.errors import PlanError


def stage_devices(schedule: str, pp: int, num_stages: int) -> tuple[int, ...]:
    """Device of every stage: in turn (stage s on device `s % pp`), or as a V.

    Args:
        schedule: One of `cost_config.SCHEDULES`.
        pp: Devices.
        num_stages: A multiple of `pp`; `2 * pp` for a V.
    """
    if schedule in V_SHAPED:
        return tuple(min(stage, 2 * pp - 1 - stage) for stage in range(num_stages))
    return tuple(stage % pp for stage in range(num_stages))


def stages_a_device(schedule: str) -> int | None:
    """Stages of each device; None for `interleaved`, which takes any number above 1."""
    return None if schedule == "interleaved" else 2 if schedule in V_SHAPED else 1


def usual_schedule(virtual_stages: int) -> str:
    """The schedule of a plan that names none."""
    return "interleaved" if virtual_stages > 1 else "1f1b"


def check_schedule(schedule: str, virtual_stages: int) -> None:
    """Refuse a schedule that is not known or needs another number of stages a device.

    Errors:
        PlanError: one sentence with the nearest legal value.
    """
    known = (*SCHEDULES, *ASYNCHRONOUS)
    if schedule not in known:
        near = get_close_matches(schedule, known, n=1, cutoff=0.0)[0]
        raise PlanError(
            f"plan: schedule={schedule!r} must be one of {', '.join(known)}; nearest legal: {near}."
        )
    held = stages_a_device(schedule)
    if virtual_stages != held and (held is not None or virtual_stages == 1):
        raise PlanError(
            f"plan: virtual_stages={virtual_stages} must be {held or 'above 1'} with the schedule "
            f"{schedule}; nearest legal: {held or 2}."
        )
