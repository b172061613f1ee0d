"""Schema of what the plan is for: seconds, or the dollars of a job."""

from dataclasses import dataclass

from darts_parallel.checks import require_at_least, require_member
from darts_parallel.errors import ConfigError

OBJECTIVES = ("time", "cost", "time_under_budget", "cost_under_deadline")


@dataclass
class ObjectiveConfig:
    """What is made small, and within what."""

    name: str = "time"
    num_iterations: float | None = None
    """Optimizer steps of the job; dollars need them."""
    budget_usd: float | None = None
    deadline_hours: float | None = None
    choose_nodes: bool = False
    """The node groups are an offer: rent as many nodes of each as the objective wants."""

    def __post_init__(self) -> None:
        require_member("objective.name", self.name, OBJECTIVES)
        for key in ("num_iterations", "budget_usd", "deadline_hours"):
            value = getattr(self, key)
            if value is not None:
                require_at_least(f"objective.{key}", value, 0, strict=True)
        needed = {"time_under_budget": "budget_usd", "cost_under_deadline": "deadline_hours"}
        keys = [needed[self.name]] if self.name in needed else []
        for key in keys + (["num_iterations"] if self.name != "time" else []):
            if getattr(self, key) is None:
                raise ConfigError(
                    f"objective.{key} must be given with objective={self.name}; nearest legal: "
                    f"objective.{key}={100000 if key == 'num_iterations' else 100}."
                )
