"""Schema of the bilevel search's YAML, `conf/bilevel/`."""

from dataclasses import dataclass

from darts_parallel.config.checks import MAX_SIZE, check_fields, one_of, ranged
from darts_parallel.config.rules import check_rules

CONTROLS = ("none", "frozen_weights", "no_weight_step", "random_logits")
STEPS = 1_000_000


@dataclass
class BilevelConfig:
    """The search and the retraining of its plan."""

    num_steps: int = ranged(200, 1, STEPS)
    """Weight steps of the search."""
    warmup_steps: int = ranged(10, 0, STEPS)
    """Weight steps with exact collectives, before the first logit step."""
    logit_every: int = ranged(4, 1, STEPS)
    """Weight steps for each step of the logits."""
    num_restarts: int = ranged(4, 1, 1000)
    """Relaxed plans of every pipeline degree and number of micro-batches that are searched side by
    side."""
    control: str = one_of("none", CONTROLS)
    """Part of the loop that is left out, to see whether it matters. `frozen_weights` measures everything
    and leaves the weights as they are after the warm-up. `no_weight_step` makes no weight step either.
    `random_logits` leaves the logits at their random start."""
    estimator: str = one_of("trials", ("trials", "mixture"))
    """Prices few bits by `trials` from the initial weights, or by the slope of a `mixture`'s
    validation loss (DARTS)."""
    trial_steps: int = ranged(100, 1, STEPS)
    """Weight steps of a trial; trials are made once in a search. Only the last fifth counts: for 45
    steps the toy learns which bytes are frequent, its blocks contribute nothing, and rounding costs
    nothing."""
    trial_seeds: int = ranged(2, 1, 100)
    """Trials of every choice: one alone may be wrong by a factor of two."""
    order: str = one_of("first", ("first", "second", "one_level"))
    """Slope of a `mixture`. `first` takes the weights as given. `second` differentiates through one
    weight step by double backward (DARTS). `one_level` takes the training loss for both levels."""
    retrain_steps: int = ranged(200, 1, STEPS)
    """Weight steps of the reference, at 16 bits and training.global_batch_size; its test loss at
    their end is the target of all trainings."""
    retrain_factor: float = ranged(2.0, 1.0, 1e3)
    """A training goes on until it reaches the target, but at most for this many times the
    reference's predicted seconds."""
    retrain_seeds: int = ranged(1, 0, 10)
    """Trainings of every plan; their seeds are not the search's. 0: the plan is not judged."""
    learning_rate: float = ranged(1.5e-3, 1e-9, 1.0)
    """Step size of Adam. Tune it before you compare plans: at too large a step few bits seem to help."""
    learning_rate_warmup: int = ranged(20, 0, STEPS)
    """Steps over which the learning rate rises linearly."""
    batch_candidates: list[int] = ranged([], 1, MAX_SIZE)
    """Global batch sizes that the plan may choose from, phase by phase, next to
    training.global_batch_size."""
    look_ahead_steps: int = ranged(40, 1, STEPS)
    """Length of a look-ahead, in weight steps at training.global_batch_size. Copies of the training go on
    with each batch size for equal predicted seconds; their validation losses price the batch sizes."""
    look_ahead_every: int = ranged(2, 1, STEPS)
    """Logit steps from one look-ahead to the next."""
    decay: float = ranged(0.9, 0.0, 0.9999)
    """Decay of the moving averages behind the gradient noise scale, for each weight step."""
    validation_sequences: int = ranged(64, 1, 100_000)
    """Sequences of the validation batches, and of the fixed test batch behind the target."""
    evaluate_every: int = ranged(10, 1, STEPS)
    """Predicted seconds between two test losses, in steps of the reference."""
    exact_seconds: float = ranged(30.0, 0.0, 1e8)
    """Time limit of the exact optimum of each batch size."""

    def __post_init__(self) -> None:
        check_fields("bilevel", self)
        check_rules("bilevel", self)
