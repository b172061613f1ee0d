"""What a search reports: its state at a step, and its result."""

from dataclasses import dataclass, field

from torch import Tensor

from darts_parallel.strategy import Plan


@dataclass(frozen=True)
class Schedules:
    """The annealed quantities at one step."""

    temperature: float
    boundary_temperature: float
    sharpness: float
    hard_stages: bool = False
    """Stage weights are rounded in the forward pass (straight-through)."""
    hard_choices: bool = False
    """So are strategy weights."""


@dataclass(frozen=True)
class StepRecord:
    """What the search looked like at one step; tensors belong to the leading relaxed plan."""

    step: int
    seconds: float
    schedules: Schedules
    loss: float
    surrogate_time_s: float
    best_time_s: float
    entropy: float
    outer_weights: dict[str, float]
    pp: int
    choices: tuple[str, ...]
    probabilities: Tensor
    """Shape `(L, C)`."""
    memory: Tensor
    capacity: Tensor
    multipliers: Tensor
    stage_seconds: Tensor
    terms: dict[str, float] = field(default_factory=dict)
    """The surrogate's seconds per iteration by cause; they sum to `surrogate_time_s`."""


@dataclass(frozen=True)
class SearchResult:
    """The best plan, the best before polishing, and how the search went."""

    plan: Plan
    iteration_time_s: float
    raw_plan: Plan
    raw_iteration_time_s: float
    alternatives: tuple[tuple[float, Plan], ...]
    """The best plan of every other outer choice that was visited, fastest first."""
    history: tuple[StepRecord, ...]
    seconds: float
    steps: int
    restarts: int
    seed: int
    plans_evaluated: int
    stopped_by: str | None = None
    """`user` (Ctrl-C) or `time_limit` where the search ended early; None where it ran to its end."""
    method: str = "gradient"
    """What found the plan: `gradient`, or an exact method that `search=auto` took."""
    why: str = ""
    """Why that method, one clause; empty where it was asked for."""
    curve: tuple[tuple[float, float], ...] = ()
    """Anytime curve: seconds at which the best hard plan improved, and its seconds per iteration."""
