"""Schema of the configuration group `search`."""

from dataclasses import dataclass

from darts_parallel.config.checks import check_fields, one_of, ranged, require

FITTINGS = ("repair", "fill", "prices", "splits")
ANNEALED = ("temperature", "sharpness")
"""Settings that are a first and a last value."""


LEAST_SECONDS = 1e-3
"""Shortest search that can be asked for."""


@dataclass
class SearchConfig:
    """Choose the search, and set the gradient search."""

    method: str = one_of("gradient", ("gradient", "exact", "auto"))
    """`gradient`: the differentiable search, always, then checked; `exact`: the exact methods alone;
    `auto`: the exact methods where they prove their plan in a moment, else as `gradient`."""
    exact_seconds: float = ranged(5.0, 0.0, 1e8)
    """Seconds that `auto` gives the exact methods before it descends."""
    num_steps: int = ranged(300, 1, 10**6)
    """Steps of the gradient descent."""
    num_restarts: int = ranged(32, 1, 4096)
    """Relaxed plans that descend side by side, from different beginnings."""
    seed: int = ranged(0, 0, 2**63 - 1)
    """Seed of every random number of the search."""
    fitting: str = one_of("splits", FITTINGS)
    """How the best rounded plans are made to fit the memory. Each setting includes the ones before it.
    `repair`: lighter strategies where a stage does not fit. `fill`: faster ones where memory is left.
    `prices`: all strategies chosen again, under a price of memory. `splits`: stage boundaries, too."""
    learning_rate: float = ranged(0.1, 1e-9, 1e3)
    """Adam's step for the logits of strategies, of pipeline configurations and of offloaded shares."""
    temperature: list[float] = ranged([2.0, 1.0], 1e-4, 1e6)
    """First and last softmax temperature, geometric in between."""
    sharpness: list[float] = ranged([20.0, 220.0], 1e-4, 1e6)
    """First and last sharpness of the smooth maximum over stages."""
    penalty: float = ranged(10.0, 0.0, 1e6)
    """Quadratic penalty on the relative memory violation."""
    polish: bool = True
    """Improve the best plans by moves and by the exact solver's segment programs."""
    polish_labels: int = ranged(1_600_000, 0, 10**9)
    """Labels that the segment programs may make for all finalists together; 0 skips the programs."""
    order_passes: int = ranged(800_000_000, 0, 10**12)
    """Passes that local search of one seed may time, 6 ns each, where `space.schedules` lists
    `searched`; the next seeds follow until `search.max_seconds`, or until three gain nothing. 0
    skips the local search."""
    tie: float = ranged(0.01, 0.0, 0.2)
    """Slowdown that is accepted for a plan that is easier to run (0.01: 1 %): more trainers take it, then
    a lower ZeRO level, fewer strategies, fewer different stages. 0 keeps the fastest plan, as `exact`
    does."""
    max_seconds: float = ranged(120.0, LEAST_SECONDS, 1e8)
    """The search stops cleanly after this long and returns its best plan; descent gets the first half.
    Searches that leave more memory free share these seconds. Each has at least a tenth of them."""

    def __post_init__(self) -> None:
        check_fields("search", self)
        for key in ANNEALED:
            values = list(getattr(self, key))
            closest = (values * 2)[:2] or [1.0, 1.0]
            require(len(values) == 2, f"search.{key}={values}", "be a list of two numbers", closest)
