"""Schema of the configuration group `search`."""

from dataclasses import dataclass

from darts_parallel.config.checks import check_fields, one_of, ranged, require

FITTINGS = ("repair", "fill", "prices", "splits")


@dataclass
class SearchConfig:
    """Choose the search, and set the gradient search."""

    method: str = one_of("gradient", ("gradient", "exact", "auto"))
    """`gradient`: the differentiable search, always, then checked; `exact`: the exact methods alone;
    `auto`: the exact methods where they prove their plan in a moment, else as `gradient`."""
    exact_seconds: float = ranged(5.0, 0.0, 1e8)
    """Seconds that `auto` gives the exact methods before it descends."""
    num_steps: int = ranged(300, 1, 10**6)
    num_restarts: int = ranged(32, 1, 4096)
    seed: int = ranged(0, 0, 2**63 - 1)
    relaxation: str = one_of("softmax", ("softmax", "gumbel"))
    """`softmax`, or `gumbel` for straight-through Gumbel-softmax samples."""
    fitting: str = one_of("splits", FITTINGS)
    """How the best rounded plans meet the memory: `repair`, lighter strategies where they do not fit; `fill`,
    also faster ones where memory is left; `prices`, also all strategies anew under the price of a stage's
    bytes at which they fit; `splits`, also stage edges anew, the best for these strategies."""
    learning_rate: float = ranged(0.1, 1e-9, 1e3)
    boundary_learning_rate: float = ranged(0.05, 1e-9, 1e3)
    adam_betas: list[float] = ranged([0.5, 0.999], 1e-6, 0.999999)
    temperature: list[float] = ranged([2.0, 0.05], 1e-4, 1e6)
    """First and last softmax temperature, geometric in between."""
    boundary_temperature: list[float] = ranged([1.0, 0.1], 1e-4, 1e6)
    """First and last temperature of the stage edges, in layers."""
    sharpness: list[float] = ranged([20.0, 220.0], 1e-4, 1e6)
    """First and last sharpness of the smooth maximum over stages."""
    initial_noise: float = ranged(0.3, 0.0, 1e3)
    """Standard deviation of the per-layer noise on the shared initial preference."""
    initial_preference: float = ranged(3.0, 0.0, 1e3)
    """Logit of the strategy that all layers of a restart prefer at first."""
    multiplier_step: float = ranged(1.0, 0.0, 1e6)
    """Step of the augmented Lagrangian's memory multipliers."""
    penalty: float = ranged(10.0, 0.0, 1e6)
    """Quadratic penalty on the relative memory violation."""
    thin_at: list[float] = ranged([0.05, 0.15, 0.3, 0.5], 0.0, 1.0)
    """Shares of the steps after which the worse half of the restarts is dropped."""
    hard_stages_from: float = ranged(0.5, 0.0, 1.0)
    """Share of the steps after which stage edges are rounded in the forward pass (straight-through)."""
    hard_choices_from: float = ranged(1.0, 0.0, 1.0)
    """Share of the steps after which strategies are hard; 1 keeps them soft to the end."""
    hard_every: int = ranged(10, 1, 10**6)
    """Steps between discretizations of all restarts. With 20 a search of BERT in tight memory has a raw plan
    17 % behind, and no fewer seconds: it polishes more."""
    record_every: int = ranged(10, 1, 10**6)
    """Steps between two points of the curves."""
    simulate_every: int = ranged(5, 1, 10**6)
    """With `cost.pipeline=simulated`: steps between simulations of all restarts; in between the seconds
    are those along the last critical paths. Hard plans are always simulated."""
    polish: bool = True
    polish_starts: int = ranged(16, 1, 4096)
    """Best distinct discretized plans that are polished by cheap moves."""
    polish_finalists: int = ranged(3, 1, 4096)
    """Best of those that are polished by all moves."""
    polish_labels: int = ranged(1_600_000, 0, 10**9)
    """Labels that the exact segment programs may make for the outer choices of those together; 0: none. With
    200,000 for each GPT-3 175B on 384 A100 ends 0.19 % above the proof, in the same seconds."""
    order_passes: int = ranged(800_000_000, 0, 10**12)
    """Passes of simulated pipelines that are timed by local search, 6 ns each, where `space.schedules` lists
    `searched`; a twentieth where orders stay, and layers alone move; 0: none."""
    max_seconds: float = ranged(120.0, 1e-3, 1e8)
    """The search stops cleanly after this long and returns its best plan; descent gets the first half."""

    def __post_init__(self) -> None:
        check_fields("search", self)
        for key in ("temperature", "boundary_temperature", "sharpness", "adam_betas"):
            values = list(
                getattr(self, key)
            )  # those of the first step and the last, and Adam's two decays
            near = (values * 2)[:2] or [0.5, 0.999]
            require(len(values) == 2, f"search.{key}={values}", "be a list of two numbers", near)
