"""Settings of a run; every field can be set as `key=value` on the command line."""

from dataclasses import dataclass, replace
from pathlib import Path

from darts_parallel.config import Config, load_config, require_at_least, require_member
from darts_parallel.errors import ConfigError, PlanError
from darts_parallel.plans import Plan, read_plan, refuse_unexecutable, required_config
from darts_parallel.problem import Problem

DEVICES = ("auto", "cpu", "cuda")


@dataclass
class RunSettings:
    """Command line of `python -m darts_parallel.run`."""

    plan: str = ""
    """The plan.json to run."""
    verify: bool = False
    """Compare with one process: loss, every gradient, bytes of state."""
    steps: int = 5
    """Training steps that are measured; 0 measures none."""
    warmup: int = 2
    """Steps before them."""
    seed: int = 0
    """Seed of weights and data."""
    device: str = "auto"
    """`cpu` (gloo), `cuda` (nccl), or `auto`: what the plan was made for."""
    timeout_s: float = 25.0
    """Longest wait for another process."""
    cluster: str = ""
    """A cluster file to predict with, e.g. of `darts-parallel profile`; empty: the plan's own."""
    output: str = ""
    """A JSON file for all results; empty: none."""

    def __post_init__(self) -> None:
        for key, least in (("steps", 0), ("warmup", 0), ("seed", 0)):
            require_at_least(key, getattr(self, key), least)
        require_at_least("timeout_s", self.timeout_s, 0, strict=True)
        require_member("device", self.device, DEVICES)


def load(settings: RunSettings) -> tuple[Problem, Plan]:
    """Load the plan of the settings and its problem in float32, checked for execution.

    Errors:
        PlanError: the file is missing or broken.
        UnsupportedError: the plan cannot run.
    """
    if not settings.plan:
        raise PlanError("plan is missing; try plan=plan.json, which darts-parallel writes.")
    config = _in_float32(required_config(settings.plan))
    problem = measured_cluster(Problem.from_config(config), settings.cluster)
    plan = read_plan(settings.plan, problem.model)
    refuse_unexecutable(plan, problem)
    return problem, plan


def measured_cluster(problem: Problem, path: str) -> Problem:
    """Put a problem on the cluster of a file, e.g. of `darts-parallel profile`; none where `path` is empty.

    Args:
        path: `FOLDER/cluster/NAME.yaml`, whose devices lie in `FOLDER/device`.

    Errors:
        ConfigError: the file is missing or broken, or has another number of devices.
    """
    if not path:
        return problem
    file = Path(path)
    if not file.is_file():
        raise ConfigError(
            f"cluster={path} must be a file; try outputs/measured/cluster/measured.yaml, which "
            "darts-parallel profile writes."
        )
    names = [f"cluster={file.stem}", "model=toy", "training=toy", "training.precision=fp32"]
    cluster = load_config(names, str(file.absolute().parent.parent)).cluster
    found = problem.with_config(cluster=cluster)
    if found.cluster.num_devices != problem.cluster.num_devices:
        raise ConfigError(
            f"cluster={path} was measured with {found.cluster.num_devices} processes, and the plan has "
            f"{problem.cluster.num_devices}; try torchrun --nproc-per-node "
            f"{problem.cluster.num_devices} -m darts_parallel profile."
        )
    return found


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
