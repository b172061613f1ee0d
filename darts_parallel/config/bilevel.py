"""Schema of the bilevel search's YAML, `conf/bilevel/`."""

from dataclasses import dataclass, field

from darts_parallel.config.checks import require_at_least, require_member
from darts_parallel.errors import ConfigError

ORDERS = ("first", "second")
MIXES = ("collective", "block")
ARMS = ("bilevel", "all_16_bit", "all_4_bit", "time_only", "random_equal_time")
POSITIVE = (
    "num_steps",
    "logit_every",
    "trial_every",
    "retrain_steps",
    "validation_sequences",
    "evaluate_every",
)
"""Settings that are whole numbers above 0."""


@dataclass
class BilevelConfig:
    """The search and the retraining of its plan."""

    num_steps: int = 200
    """Weight steps of the search."""
    warmup_steps: int = 60
    """Weight steps before the first logit step."""
    logit_every: int = 2
    """Weight steps between logit steps."""
    retrain_steps: int = 300
    learning_rate: float = 1.5e-3
    """Of the weights. Measured with one seed, context 64, 300 steps: 2.21 nats at 1.5e-3, 2.28 at 3e-3,
    where 2-bit gradients seemed to gain 0.04 nats (0.01 at 1.5e-3): tune it before comparing plans."""
    learning_rate_warmup: int = 20
    """Steps over which the learning rate rises linearly."""
    logit_learning_rate: float = 0.1
    temperature: list[float] = field(default_factory=lambda: [1.0, 1.0])
    """First and last softmax temperature, geometric in between."""
    order: str = "first"
    """`first` takes the weights as given; `second` differentiates through one weight step (DARTS)."""
    mix: str = "collective"
    """Where candidates are mixed: at each all-reduce, or at the output of the whole block."""
    batch_candidates: list[int] = field(default_factory=list)
    """Global batch sizes that the plan may choose from; empty: only training.global_batch_size."""
    trial_steps: int = 40
    """Weight steps of the trials that measure what lossy sums and gradients cost; 0: by single steps."""
    trial_every: int = 80
    """Weight steps between trials."""
    decay: float = 0.9
    """Of the moving averages behind the noise scale and the progress of compressed gradients."""
    validation_sequences: int = 64
    """Fixed validation batch that curves and final losses are measured on."""
    evaluate_every: int = 20
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2, 3, 4])
    """One search and one retraining of every arm for each."""
    arms: list[str] = field(default_factory=lambda: list(ARMS))
    """Plans that are retrained from scratch: the found one and its rivals."""

    def __post_init__(self) -> None:
        for key in POSITIVE:
            require_at_least(f"bilevel.{key}", getattr(self, key), 1)
        for key in ("warmup_steps", "learning_rate_warmup", "trial_steps"):
            require_at_least(f"bilevel.{key}", getattr(self, key), 0)
        for key in ("learning_rate", "logit_learning_rate"):
            require_at_least(f"bilevel.{key}", getattr(self, key), 0, strict=True)
        if len(self.temperature) != 2 or min(self.temperature) <= 0.0:
            raise ConfigError(
                f"bilevel.temperature={list(self.temperature)} must be two numbers above 0, first and last; "
                "nearest legal: [1.0,1.0]."
            )
        require_member("bilevel.order", self.order, ORDERS)
        require_member("bilevel.mix", self.mix, MIXES)
        for arm in self.arms:
            require_member("bilevel.arms", arm, ARMS)
        for seed in self.seeds:
            require_at_least("bilevel.seeds", seed, 0)
        for batch in self.batch_candidates:
            require_at_least("bilevel.batch_candidates", batch, 1)
        if not self.seeds or not self.arms:
            raise ConfigError(
                "bilevel.seeds and bilevel.arms must each list at least one value; nearest legal: "
                "bilevel.seeds=[0] bilevel.arms=[bilevel]."
            )
