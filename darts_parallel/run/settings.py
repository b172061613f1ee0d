"""Settings of a run; every field can be set as `key=value` on the command line."""

from dataclasses import dataclass, replace

from darts_parallel.config import Config, one_of, ranged
from darts_parallel.errors import ConfigError, PlanError
from darts_parallel.plans import Plan, read_plan, refuse_unexecutable, required_config
from darts_parallel.problem import Problem


@dataclass
class RunSettings:
    """Command line of `python -m darts_parallel.run`."""

    plan: str = ""
    """The plan.json to run."""
    verify: bool = False
    """Compare with one process: loss, every gradient, bytes of state."""
    steps: int = ranged(5, 0)
    """Training steps that are measured; 0 measures none."""
    warmup: int = ranged(2, 0)
    """Steps before them."""
    seed: int = ranged(0, 0, 2**63 - 1)
    """Seed of weights and data."""
    device: str = one_of("auto", ("auto", "cpu", "cuda"))
    """`cpu` (gloo), `cuda` (nccl), or `auto`: what the plan was made for."""
    timeout_s: float = ranged(25.0, 1e-3, 1e8)
    """Longest wait for another process."""


def load(settings: RunSettings) -> tuple[Problem, Plan]:
    """Load the plan of the settings and its problem in float32, checked for execution.

    Errors:
        PlanError: the file is missing or broken.
        UnsupportedError: the plan cannot run.
    """
    if not settings.plan:
        raise PlanError("plan is missing; try plan=plan.json, which darts-parallel writes.")
    problem = Problem.from_config(_in_float32(required_config(settings.plan)))
    plan = read_plan(settings.plan, problem.model)
    refuse_unexecutable(plan, problem)
    return problem, plan


def _in_float32(config: Config) -> Config:
    """Set float32, the precision that runs here, where the devices' peak is known for it."""
    known = all(
        "fp32" in config.cluster.devices[group.device].peak_TFLOPs for group in config.cluster.nodes
    )
    if not known:
        raise ConfigError(
            f"cluster={config.cluster.name} states no fp32 peak, in which the run computes; try "
            "cluster.devices.*.peak_TFLOPs with fp32."
        )
    return replace(config, training=replace(config.training, precision="fp32"))
