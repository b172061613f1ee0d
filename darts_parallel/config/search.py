"""Schema of the configuration group `search`."""

from dataclasses import dataclass, field

from darts_parallel.config.checks import require_at_least, require_at_most, require_member, require_within
from darts_parallel.errors import ConfigError

METHODS = ("gradient", "exact", "auto")
RELAXATIONS = ("softmax", "gumbel")
FITTINGS = ("repair", "fill", "prices", "splits")
NAMED = {"method": METHODS, "relaxation": RELAXATIONS, "fitting": FITTINGS}
"""Values of the settings that are names."""
LEAST = {
    **dict.fromkeys(("num_steps", "num_restarts", "hard_every", "record_every", "simulate_every"), 1),
    **dict.fromkeys(("polish_starts", "polish_finalists"), 1),
    **dict.fromkeys(("seed", "polish_labels", "exact_seconds"), 0),
    **dict.fromkeys(("initial_noise", "initial_preference", "multiplier_step", "penalty"), 0),
}
PLAUSIBLE: dict[str, tuple[float, float]] = {
    "exact_seconds": (0.0, 1e8),
    "max_seconds": (1e-3, 1e8),
    "learning_rate": (1e-9, 1e3),
    "boundary_learning_rate": (1e-9, 1e3),
    "initial_noise": (0.0, 1e3),
    "initial_preference": (0.0, 1e3),
    "multiplier_step": (0.0, 1e6),
    "penalty": (0.0, 1e6),
    "hard_every": (1, 10**6),
    "record_every": (1, 10**6),
    "simulate_every": (1, 10**6),
    "polish_labels": (0, 10**9),
    "polish_starts": (1, 4096),
    "polish_finalists": (1, 4096),
}
"""Least and most of the settings that are numbers."""


@dataclass
class SearchConfig:
    """Choose the search, and set the gradient search."""

    method: str = "gradient"
    """`gradient`: the differentiable search, always, then checked; `exact`: the exact methods alone;
    `auto`: the exact methods where they prove their plan in a moment, else as `gradient`."""
    exact_seconds: float = 5.0
    """Seconds that `auto` gives the exact methods before it descends."""
    num_steps: int = 300
    num_restarts: int = 32
    seed: int = 0
    relaxation: str = "softmax"
    """`softmax`, or `gumbel` for straight-through Gumbel-softmax samples."""
    fitting: str = "splits"
    """How the best rounded plans meet the memory: `repair`, lighter strategies where they do not fit; `fill`,
    also faster ones where memory is left; `prices`, also all strategies anew under the price of a stage's
    bytes at which they fit; `splits`, also stage edges anew, the best for these strategies."""
    learning_rate: float = 0.1
    boundary_learning_rate: float = 0.05
    adam_betas: list[float] = field(default_factory=lambda: [0.5, 0.999])
    temperature: list[float] = field(default_factory=lambda: [2.0, 0.05])
    """First and last softmax temperature, geometric in between."""
    boundary_temperature: list[float] = field(default_factory=lambda: [1.0, 0.1])
    """First and last temperature of the stage edges, in layers."""
    sharpness: list[float] = field(default_factory=lambda: [20.0, 220.0])
    """First and last sharpness of the smooth maximum over stages."""
    initial_noise: float = 0.3
    """Standard deviation of the per-layer noise on the shared initial preference."""
    initial_preference: float = 3.0
    """Logit of the strategy that all layers of a restart prefer at first."""
    multiplier_step: float = 1.0
    """Step of the augmented Lagrangian's memory multipliers."""
    penalty: float = 10.0
    """Quadratic penalty on the relative memory violation."""
    thin_at: list[float] = field(default_factory=lambda: [0.05, 0.15, 0.3, 0.5])
    """Shares of the steps after which the worse half of the restarts is dropped."""
    hard_stages_from: float = 0.5
    """Share of the steps after which stage edges are rounded in the forward pass (straight-through)."""
    hard_choices_from: float = 1.0
    """Share of the steps after which strategies are hard; 1 keeps them soft to the end."""
    hard_every: int = 10
    """Steps between discretizations of all restarts. With 20 a search of BERT in tight memory has a raw plan
    17 % behind, and no fewer seconds: it polishes more."""
    record_every: int = 10
    """Steps between two points of the curves."""
    simulate_every: int = 5
    """With `cost.pipeline=simulated`: steps between simulations of all restarts; in between the seconds
    are those along the last critical paths. Hard plans are always simulated."""
    polish: bool = True
    polish_starts: int = 16
    """Best distinct discretized plans that are polished by cheap moves."""
    polish_finalists: int = 3
    """Best of those that are polished by all moves."""
    polish_labels: int = 1_600_000
    """Labels that the exact segment programs may make for the outer choices of those together; 0: none. With
    200,000 for each GPT-3 175B on 384 A100 ends 0.19 % above the proof, in the same seconds."""
    max_seconds: float = 120.0
    """The search stops cleanly after this long and returns its best plan; descent gets the first half."""

    def __post_init__(self) -> None:
        for key, named in NAMED.items():
            require_member(f"search.{key}", getattr(self, key), named)
        for key, least in LEAST.items():
            require_at_least(f"search.{key}", getattr(self, key), least)
        for key, most in (("num_steps", 10**6), ("num_restarts", 4096), ("seed", 2**63 - 1)):
            require_at_most(f"search.{key}", getattr(self, key), most)
        for key in ("learning_rate", "boundary_learning_rate", "max_seconds"):
            require_at_least(f"search.{key}", getattr(self, key), 0, strict=True)
        for key, (low, high) in PLAUSIBLE.items():
            require_within(f"search.{key}", getattr(self, key), low, high)
        shares = [("thin_at", share) for share in self.thin_at]
        shares += [(key, getattr(self, key)) for key in ("hard_stages_from", "hard_choices_from")]
        for key, share in shares:
            require_at_least(f"search.{key}", share, 0)
            require_at_most(f"search.{key}", share, 1)
        self._require_pairs()

    def _require_pairs(self) -> None:
        """Check values from the first step to the last, and Adam's two decays."""
        for key in ("temperature", "boundary_temperature", "sharpness", "adam_betas"):
            values = getattr(self, key)
            if len(values) != 2:
                raise ConfigError(
                    f"search.{key}={list(values)} must be a list of two numbers; try "
                    f"{(list(values) * 2)[:2] or [0.5, 0.999]}."
                )
            for value in values:
                require_at_least(f"search.{key}", value, 0, strict=True)
                if key != "adam_betas":
                    require_within(f"search.{key}", value, 1e-4, 1e6)
        if max(self.adam_betas) >= 1:
            raise ConfigError(f"search.adam_betas={list(self.adam_betas)} must lie in (0, 1); try 0.999.")
