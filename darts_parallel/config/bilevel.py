"""Schema of the bilevel search's YAML, `conf/bilevel/`."""

from dataclasses import dataclass, field

from darts_parallel.config.checks import (
    MAX_PROCESSES,
    require_member,
    require_members,
    require_size,
    require_within,
)
from darts_parallel.config.model import MAX_SIZE
from darts_parallel.errors import ConfigError

ESTIMATORS = ("trials", "mixture")
ORDERS = ("first", "second")
VARIANTS = ("bilevel", "raw", "all_16_bit")
STEPS = 1_000_000
LARGEST = {
    "num_steps": STEPS, "trial_steps": STEPS, "retrain_steps": STEPS, "evaluate_every": STEPS,
    "num_restarts": 1000, "trial_seeds": 100, "retrain_seeds": 10, "validation_sequences": 100_000,
    "processes": MAX_PROCESSES,
}  # fmt: skip
"""Settings that are whole numbers above 0, with the largest that means anything."""
LARGEST_SEED = 9_999
"""Retrainings and selections have seeds of their own above those of searches."""


@dataclass
class BilevelConfig:
    """The search and the retraining of its plan."""

    num_steps: int = 80
    """Weight steps of the search."""
    warmup_steps: int = 10
    """Weight steps with exact collectives, before the first logit step."""
    num_restarts: int = 6
    """Relaxed plans of every pipeline degree and number of micro-batches that are searched side by side."""
    estimator: str = "trials"
    """Prices few bits by `trials` from the initial weights, or by the slope of a `mixture`'s validation loss
    (DARTS)."""
    trial_steps: int = 100
    """Weight steps of a trial; trials are made once in a search. Only the last fifth counts: for 45 steps
    the toy learns which bytes are frequent, its blocks contribute nothing, and rounding costs nothing."""
    trial_seeds: int = 2
    """Trials of every choice: one alone may be wrong by a factor of two."""
    order: str = "first"
    """Order of the slope of a `mixture`: `first` takes the weights as given; `second` differentiates through
    one weight step (DARTS), by double backward."""
    retrain_steps: int = 100
    """Weight steps of the reference; its test loss at their end is the target of all variants."""
    retrain_factor: float = 3.0
    """A variant is trained until it reaches the target, but at most this many times `retrain_steps`."""
    retrain_seeds: int = 1
    """Trainings of every variant; their seeds are not the search's."""
    learning_rate: float = 1.5e-3
    """Step size of Adam. Measured with one seed, context 64, 300 steps: 2.21 nats at 1.5e-3, 2.28 at 3e-3,
    where 2-bit gradients seemed to gain 0.04 nats (0.01 at 1.5e-3): tune it before comparing plans."""
    learning_rate_warmup: int = 20
    """Steps over which the learning rate rises linearly."""
    batch_candidates: list[int] = field(default_factory=list)
    """Global batch sizes that the plan may choose from; empty: only training.global_batch_size."""
    decay: float = 0.9
    """Decay of the moving averages behind the noise scale and the shares of the blocks."""
    validation_sequences: int = 64
    """Fixed test batch that curves and targets are measured on."""
    evaluate_every: int = 10
    seeds: list[int] = field(default_factory=lambda: [0])
    """One search and `retrain_seeds` retrainings of every variant for each."""
    variants: list[str] = field(default_factory=lambda: ["bilevel", "all_16_bit"])
    """Plans that are retrained from scratch: the found one (`bilevel`), what the logits themselves round to
    (`raw`), and the fastest at 16 bits (`all_16_bit`)."""
    exact_seconds: float = 30.0
    """Time limit of the exact optimum of the learned objective."""
    processes: int = 2
    """Trainings that run side by side, each on one core."""

    def __post_init__(self) -> None:
        self._check_values()
        self._check_lists()
        if self.estimator == "trials" and self.order != "first":
            raise ConfigError(
                f"bilevel.order={self.order} needs an estimator with a gradient in the mixture, which trials "
                "have not; try bilevel.estimator=mixture."
            )

    def _check_values(self) -> None:
        for key, largest in LARGEST.items():
            require_size(f"bilevel.{key}", getattr(self, key), largest)
        for key, least, most in (
            ("warmup_steps", 0, STEPS),
            ("learning_rate_warmup", 0, STEPS),
            ("exact_seconds", 0, 1e8),
            ("learning_rate", 1e-9, 1),
            ("retrain_factor", 1, 1000),
            ("decay", 0, 0.9999),
        ):
            require_within(f"bilevel.{key}", getattr(self, key), least, most)
        require_member("bilevel.estimator", self.estimator, ESTIMATORS)
        require_member("bilevel.order", self.order, ORDERS)

    def _check_lists(self) -> None:
        require_members("bilevel.variants", self.variants, VARIANTS)
        for seed in self.seeds:
            require_within("bilevel.seeds", seed, 0, LARGEST_SEED)
        for batch in self.batch_candidates:
            require_size("bilevel.batch_candidates", batch, MAX_SIZE)
        if not self.seeds or not self.variants:
            raise ConfigError(
                "bilevel.seeds and bilevel.variants must each list at least one value; try "
                "bilevel.seeds=[0] bilevel.variants=[bilevel]."
            )
