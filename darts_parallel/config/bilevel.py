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

ASYNCHRONOUS = ("async_1f1b", "async_1f1b_predicted")
"""Schedules that a plan file may name and the bilevel loop may choose, which prices stale weights.

1F1B that goes on with the next batch while the last one drains; two versions of the weights (PipeDream-2BW,
Narayanan et al. 2021, arXiv 2006.09503); `predicted` moves the older ahead (SpecTrain, arXiv 1809.02839)."""
ESTIMATORS = ("trials", "mixture", "gumbel")
ORDERS = ("first", "second")
LEVELS = ("two", "one")
ROUNDINGS = ("nearest", "stochastic")
EIGHT_BITS = ("int8", "fp8")
MIXES = ("collective", "block")
ARMS = (
    "bilevel",
    "logits_own",
    "all_16_bit",
    "best_uniform",
    "time_only",
    "random_equal_time",
    "sensitivity_greedy",
    "learned_optimum",
    "trials_only",
    "all_4_bit",
)
STEPS = 1_000_000
LARGEST = {
    "num_steps": STEPS, "logit_every": STEPS, "switch_every": STEPS, "trial_steps": STEPS,
    "retrain_steps": STEPS, "evaluate_every": STEPS, "num_restarts": 1000, "trial_seeds": 100,
    "retrain_seeds": 10, "random_plans": 1000, "validation_sequences": 100_000, "processes": MAX_PROCESSES,
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
    logit_every: int = 1
    """Weight steps between logit steps."""
    num_restarts: int = 6
    """Relaxed plans of every pipeline degree and number of micro-batches that are searched side by side."""
    estimator: str = "trials"
    """Prices few bits by `trials` from the initial weights, shared among blocks by hard one-layer switches;
    `mixture` by the slope of the mixture's validation loss (DARTS), `gumbel` by that of one-hot samples."""
    trial_steps: int = 100
    """Weight steps of a trial; trials are made once in a search. Only the last fifth counts: for 45 steps
    the toy learns which bytes are frequent, its blocks contribute nothing, and rounding costs nothing."""
    trial_seeds: int = 2
    """Trials of every choice: one alone may be wrong by a factor of two."""
    switch_every: int = 4
    """Logit steps between measurements of hard one-layer switches."""
    order: str = "first"
    """Of `mixture` and `gumbel`: `first` takes the weights as given; `second` differentiates through one
    weight step (DARTS), by double backward."""
    level: str = "two"
    """`two`: logits step on validation bytes; `one`: on the training bytes of the weight step, jointly."""
    rounding: str = "nearest"
    """Of few bits, in trials, search and retraining: `nearest` level, or `stochastic`, which is unbiased."""
    hadamard: bool = False
    """Rotate every block of numbers before it is rounded, which spreads outliers, and back after it."""
    eight_bits: str = "int8"
    """What 8 bits are: `int8`, whole multiples of a step, or `fp8`, floating-point numbers (E4M3)."""
    mix: str = "collective"
    """Where a mixture is made: at each all-reduce, or at the output of the whole block."""
    retrain_steps: int = 100
    """Weight steps of the reference; its test loss at their end is the target of all arms."""
    retrain_factor: float = 3.0
    """An arm is trained until it reaches the target, but at most this many times `retrain_steps`."""
    retrain_seeds: int = 1
    """Trainings of every arm; their seeds are not the search's."""
    learning_rate: float = 1.5e-3
    """Of the weights. Measured with one seed, context 64, 300 steps: 2.21 nats at 1.5e-3, 2.28 at 3e-3,
    where 2-bit gradients seemed to gain 0.04 nats (0.01 at 1.5e-3): tune it before comparing plans."""
    learning_rate_warmup: int = 20
    """Steps over which the learning rate rises linearly."""
    batch_candidates: list[int] = field(default_factory=list)
    """Global batch sizes that the plan may choose from; empty: only training.global_batch_size."""
    schedules: list[str] = field(default_factory=lambda: ["1f1b"])
    """Pipeline schedules to choose from: `1f1b`, and `async_1f1b`, `async_1f1b_predicted`, which do not wait
    for the pipeline to drain and train with weights one update old. Trials price them."""
    sync_every: list[int] = field(default_factory=lambda: [1])
    """Steps between averages of the data-parallel replicas' weights, to choose from: 1 sums the gradients of
    every step; with more, replicas train alone in between (local SGD). Trials price it."""
    decay: float = 0.9
    """Of the moving averages behind the noise scale and the shares of the blocks."""
    validation_sequences: int = 64
    """Fixed test batch that curves and targets are measured on."""
    evaluate_every: int = 10
    seeds: list[int] = field(default_factory=lambda: [0])
    """One search and one retraining of every arm for each."""
    arms: list[str] = field(
        default_factory=lambda: ["bilevel", "all_16_bit", "best_uniform", "time_only", "random_equal_time"]
    )
    """Plans that are retrained from scratch: the found one and its rivals."""
    random_plans: int = 1
    """Random plans of equal speed that the arm of that name retrains."""
    exact_seconds: float = 30.0
    """Time limit of the exact optimum of the learned objective."""
    processes: int = 2
    """Trainings that run side by side, each on one core."""

    def __post_init__(self) -> None:
        self._check_values()
        self._check_lists()
        if self.eight_bits == "fp8" and self.rounding == "stochastic":
            raise ConfigError(
                "bilevel.eight_bits=fp8 rounds to the nearest number, so that bilevel.rounding=stochastic "
                "must go without it; nearest legal: bilevel.rounding=nearest."
            )
        self._check_trials("schedules", "1f1b", "stale weights")
        self._check_trials("sync_every", 1, "replicas that train alone")
        if self.estimator == "trials" and (self.order, self.level) != ("first", "two"):
            raise ConfigError(
                f"bilevel.order={self.order} bilevel.level={self.level} need an estimator with a gradient in "
                "the mixture, which trials have not; nearest legal: bilevel.estimator=mixture."
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
        for key, members in (
            ("estimator", ESTIMATORS),
            ("order", ORDERS),
            ("level", LEVELS),
            ("mix", MIXES),
            ("rounding", ROUNDINGS),
            ("eight_bits", EIGHT_BITS),
        ):
            require_member(f"bilevel.{key}", getattr(self, key), members)

    def _check_lists(self) -> None:
        require_members("bilevel.schedules", self.schedules, ("1f1b", *ASYNCHRONOUS))
        for every in self.sync_every:
            require_size("bilevel.sync_every", every, STEPS)
        require_members("bilevel.arms", self.arms, ARMS)
        for seed in self.seeds:
            require_within("bilevel.seeds", seed, 0, LARGEST_SEED)
        for batch in self.batch_candidates:
            require_size("bilevel.batch_candidates", batch, MAX_SIZE)
        if not self.seeds or not self.arms:
            raise ConfigError(
                "bilevel.seeds and bilevel.arms must each list at least one value; nearest legal: "
                "bilevel.seeds=[0] bilevel.arms=[bilevel]."
            )

    def _check_trials(self, key: str, reference: str | int, other: str) -> None:
        """Refuse ways to train that trials alone price where there are no trials, or no reference."""
        values = getattr(self, key)
        if reference not in values:
            raise ConfigError(
                f"bilevel.{key}={values} must hold {reference}, which trials compare with; nearest "
                f"legal: {[reference, *values]}."
            )
        if len(values) > 1 and self.estimator != "trials":
            raise ConfigError(
                f"bilevel.{key}={values} needs bilevel.estimator=trials: a mixture has no slope of {other}; "
                "nearest legal: bilevel.estimator=trials."
            )
