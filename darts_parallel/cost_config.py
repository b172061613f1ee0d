"""Schema of the cost model's YAML: which model scores the plans."""

from dataclasses import dataclass

from darts_parallel.checks import require_member
from darts_parallel.errors import ConfigError

COSTS = ("analytic", "profiled", "searcher")
PIPELINES = ("closed_form", "simulated")
SCHEDULES = ("1f1b", "gpipe", "zero_bubble")
P2P = ("blocking", "overlapped")


@dataclass
class CostConfig:
    """Which cost model scores the plans."""

    name: str = "analytic"
    profile: str | None = None
    """For `profiled`: a folder or a CSV file of measured layer times (`darts_parallel/profiled.py`)."""
    profile_model: str | None = None
    """The model as the profile spells it; null matches `model.name`."""
    profile_gpu: str | None = None
    """The GPU as the profile spells it; null matches the names of the cluster's devices."""
    pipeline: str = "closed_form"
    """`closed_form`, or `simulated`: the longest path through the schedule, slower and exact where stages
    are uneven; gradient synchronisation then starts when the stage's last backward ends."""
    schedule: str = "1f1b"
    """`1f1b`; with `pipeline=simulated` also `gpipe` (all micro-batches in flight) and `zero_bubble`
    (ZB-H1; pp of them in every stage). Plans with virtual stages are interleaved whatever it says."""
    p2p: str = "blocking"
    """Messages between stages occupy the later stage (`blocking`) or only take time (`overlapped`, with
    `pipeline=simulated`)."""

    def __post_init__(self) -> None:
        require_member("cost.name", self.name, COSTS)
        require_member("cost.pipeline", self.pipeline, PIPELINES)
        require_member("cost.schedule", self.schedule, SCHEDULES)
        require_member("cost.p2p", self.p2p, P2P)
        if self.pipeline == "simulated":
            if self.name == "searcher":
                raise ConfigError(
                    "cost.pipeline=simulated must go with cost.name=analytic or profiled, since the seed "
                    "report's model knows no stages; nearest legal: cost.pipeline=closed_form."
                )
            return
        for key, only in (("schedule", "1f1b"), ("p2p", "blocking")):
            if getattr(self, key) != only:
                raise ConfigError(
                    f"cost.{key}={getattr(self, key)} must go with cost.pipeline=simulated, since the closed "
                    f"form holds for {only} alone; nearest legal: cost.pipeline=simulated."
                )
