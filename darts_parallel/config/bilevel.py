"""Schema of the bilevel search's YAML, `conf/bilevel/`."""

from dataclasses import dataclass

from darts_parallel.config.checks import (
    MAX_PROCESSES,
    MAX_SIZE,
    check_fields,
    one_of,
    ranged,
    require,
)
from darts_parallel.errors import ConfigError

VARIANTS = ("bilevel", "raw", "all_16_bit")
STEPS = 1_000_000
LARGEST_SEED = 9_999
"""Retrainings and selections have seeds of their own above those of searches."""


@dataclass
class BilevelConfig:
    """The search and the retraining of its plan."""

    num_steps: int = ranged(80, 1, STEPS)
    """Weight steps of the search."""
    warmup_steps: int = ranged(10, 0, STEPS)
    """Weight steps with exact collectives, before the first logit step."""
    num_restarts: int = ranged(6, 1, 1000)
    """Relaxed plans of every pipeline degree and number of micro-batches that are searched side by
    side."""
    estimator: str = one_of("trials", ("trials", "mixture"))
    """Prices few bits by `trials` from the initial weights, or by the slope of a `mixture`'s
    validation loss (DARTS)."""
    trial_steps: int = ranged(100, 1, STEPS)
    """Weight steps of a trial; trials are made once in a search. Only the last fifth counts: for 45
    steps the toy learns which bytes are frequent, its blocks contribute nothing, and rounding costs
    nothing."""
    trial_seeds: int = ranged(2, 1, 100)
    """Trials of every choice: one alone may be wrong by a factor of two."""
    order: str = one_of("first", ("first", "second"))
    """Order of the slope of a `mixture`: `first` takes the weights as given; `second`
    differentiates through one weight step (DARTS), by double backward."""
    retrain_steps: int = ranged(100, 1, STEPS)
    """Weight steps of the reference; its test loss at their end is the target of all variants."""
    retrain_factor: float = ranged(3.0, 1.0, 1e3)
    """A variant is trained until it reaches the target, but at most this many times
    `retrain_steps`."""
    retrain_seeds: int = ranged(1, 1, 10)
    """Trainings of every variant; their seeds are not the search's."""
    learning_rate: float = ranged(1.5e-3, 1e-9, 1.0)
    """Step size of Adam. Measured with one seed, context 64, 300 steps: 2.21 nats at 1.5e-3, 2.28
    at 3e-3, where 2-bit gradients seemed to gain 0.04 nats (0.01 at 1.5e-3): tune it before
    comparing plans."""
    learning_rate_warmup: int = ranged(20, 0, STEPS)
    """Steps over which the learning rate rises linearly."""
    batch_candidates: list[int] = ranged([], 1, MAX_SIZE)
    """Global batch sizes that the plan may choose from; empty: only training.global_batch_size."""
    decay: float = ranged(0.9, 0.0, 0.9999)
    """Decay of the moving averages behind the noise scale and the shares of the blocks."""
    validation_sequences: int = ranged(64, 1, 100_000)
    """Fixed test batch that curves and targets are measured on."""
    evaluate_every: int = ranged(10, 1, STEPS)
    """Weight steps between two measurements of the test loss."""
    seeds: list[int] = ranged([0], 0, LARGEST_SEED)
    """One search and `retrain_seeds` retrainings of every variant for each."""
    variants: list[str] = one_of(["bilevel", "all_16_bit"], VARIANTS)
    """Plans that are retrained from scratch: the found one (`bilevel`), what the logits themselves
    round to (`raw`), and the fastest at 16 bits (`all_16_bit`)."""
    exact_seconds: float = ranged(30.0, 0.0, 1e8)
    """Time limit of the exact optimum of the learned objective."""
    processes: int = ranged(2, 1, MAX_PROCESSES)
    """Trainings that run side by side, each on one core."""

    def __post_init__(self) -> None:
        check_fields("bilevel", self)
        near = "bilevel.seeds=[0] bilevel.variants=[bilevel]"
        given = bool(self.seeds and self.variants)
        require(given, "bilevel.seeds and bilevel.variants", "each list at least one value", near)
        if self.estimator == "trials" and self.order != "first":
            raise ConfigError(
                f"bilevel.order={self.order} needs an estimator with a gradient in the mixture, which trials "
                "have not; try bilevel.estimator=mixture."
            )
