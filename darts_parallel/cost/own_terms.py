"""Cost terms of the user's own: `cost.term=package.file:function`.

The function gets a `PlanView` of B plans and returns seconds: `(B, K)`, added to each micro-batch of
every stage, or `(B,)`, added to the iteration. Its attribute `non_negative = True` declares that the
seconds are never below 0; lower bounds then still hold without the term.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cache

import torch
from torch import Tensor

from darts_parallel.config import load_function
from darts_parallel.cost.choices import BothPasses, Tensors
from darts_parallel.errors import ConfigError

COMPUTE = ("compute", "recompute")
"""Terms of a table that are `stage_compute_s`."""
MOST_WEIGHTS = 1 << 22
"""Weights of layers in one call; they bound the memory."""
SLOPE_TOLERANCE = 1e-4
"""Relative tolerance of a slope against central differences."""
LONGER = 1.07
"""Factor of the second plan of a sample."""
STEP = 1e-6
"""Relative step of the central differences."""
LEAST_SECONDS = 1e-30
"""Floor of a stage's seconds: a stage without layers must not divide by zero."""
SAME = 1e-9
"""Relative tolerance between two calls with equal rows: sums may be in another order."""


@dataclass(frozen=True)
class PlanView:
    """B relaxed or hard plans of K stages on pp devices; seconds and bytes, float64."""

    stage_compute_s: Tensor
    """Compute and recomputation of one micro-batch, `(B, K)`."""
    stage_communication_s: Tensor
    """All other seconds of one micro-batch, resharding and messages included, `(B, K)`."""
    num_micro_batches: Tensor
    """`(B,)`."""
    device_memory_bytes: Tensor
    """Peak bytes, without the framework's reserve, `(B, pp)`."""
    sync_s: Tensor
    """Gradient synchronisation and optimizer step, `(B, pp)`."""
    stage_weights: Tensor
    """Weights of the stages of every layer, `(B, L, K)`; one-hot for hard plans."""
    layer_weights: Tensor
    """Weights of the strategies of every layer, `(B, L, C)`; one-hot for hard plans."""
    stage_device: Tensor
    """Device of the pipeline that holds a stage, whole numbers, `(K,)`."""
    stage_node: Tensor
    """Node of a stage's first rank, whole numbers, `(K,)`."""
    strategies: tuple[str, ...]
    """Names of the C strategies, e.g. `tp2+sp z1 full`."""

    def rows(self, index: slice) -> "PlanView":
        """Return some of the plans."""
        return self.changed({name: getattr(self, name)[index] for name in BY_PLAN})

    def changed(self, by_plan: Tensors) -> "PlanView":
        """Return the view with other values of fields whose first axis is B."""
        return replace(self, **by_plan)  # type: ignore[arg-type]


BY_PLAN = tuple(item.name for item in fields(PlanView))[:7]
"""Fields of a `PlanView` whose first axis is B."""


@dataclass
class OwnTerm:
    """One function of the user's; its contract is checked at the first call."""

    path: str
    """`package.file:function`; names the seconds in breakdown and explanation."""
    function: Callable[[PlanView], Tensor]
    non_negative: bool
    checked: bool = False

    def __call__(self, view: PlanView) -> Tensor:
        """Return the term's seconds, `(B, K)` or `(B,)`.

        Errors:
            ConfigError: the function fails, or returns something else.
        """
        try:
            seconds = self.function(view)
        except Exception as error:  # the user's function runs here
            raise self._refused(f"fails ({type(error).__name__}: {error})") from error
        found = seconds.dtype if isinstance(seconds, Tensor) else type(seconds).__name__
        if found != torch.float64:
            raise self._refused(f"returns a {found}")
        shapes = (view.stage_compute_s.shape, view.num_micro_batches.shape)
        if seconds.shape not in shapes:
            shape = tuple(seconds.shape)
            raise self._refused(f"returns the shape {shape} for {tuple(shapes[0])} plans × stages")
        if not bool(seconds.isfinite().all()):
            raise self._refused("returns seconds that are not finite")
        if self.non_negative and bool((seconds < 0).any()):
            raise self._refused("declares non_negative and returns seconds below 0")
        return seconds

    def check(self, view: PlanView) -> None:
        """Hold the function to its contract on a first plan, and on the same with more seconds and bytes.

        Errors:
            ConfigError: two calls differ, a plan changes another plan's seconds, or slopes are wrong.
        """
        view = _sample(view)
        seconds = self(view).detach()
        if not torch.equal(seconds, self(view).detach()):
            raise self._refused("returns other seconds on a second call")
        alone = self(view.rows(slice(1))).detach()
        if not torch.allclose(alone, seconds[:1], rtol=SAME, atol=0.0):
            raise self._refused("gives a plan other seconds if other plans stand next to it")
        self._check_slopes(view)
        self.checked = True

    def _check_slopes(self, view: PlanView) -> None:
        """Compare slopes along relative changes of every field with central differences."""
        size = self(view).detach().abs().sum().clamp(min=LEAST_SECONDS)

        def share(*changes: Tensor) -> Tensor:
            pairs = zip(BY_PLAN, changes, strict=True)
            moved = {name: getattr(view, name) * (1.0 + change) for name, change in pairs}
            return self(view.changed(moved)) / size

        none = [torch.zeros_like(getattr(view, name), requires_grad=True) for name in BY_PLAN]
        if not share(*none).requires_grad:
            raise self._refused("returns seconds without a gradient")
        agrees = torch.autograd.gradcheck(
            share,
            none,
            eps=STEP,
            rtol=SLOPE_TOLERANCE,
            atol=SLOPE_TOLERANCE**2,
            raise_exception=False,
            check_undefined_grad=False,
            fast_mode=True,
        )
        if not agrees:
            raise self._refused("has other slopes than its central differences")

    def _refused(self, reason: str) -> ConfigError:
        rule = "return float64 seconds of shape (plans, stages) or (plans,), each of its own plan alone"
        return ConfigError(
            f"cost.term={self.path} {reason}; it must {rule}, as a differentiable torch expression; "
            "try examples.own_cost_term:power_cap."
        )


@dataclass(frozen=True)
class OwnTerms:
    """All terms of a table, and what they need of its placement."""

    terms: tuple[OwnTerm, ...]
    stage_node: Tensor
    """Node of a stage's first rank, `(K,)`."""

    @property
    def non_negative(self) -> bool:
        """Whether bounds without the terms hold."""
        return all(term.non_negative for term in self.terms)

    def seconds(self, view: PlanView) -> Tensors:
        """Return each term's seconds by name, `(B, K)` or `(B,)`, in slices of the plans."""
        for term in self.terms:
            if not term.checked:
                term.check(view)
        width = view.layer_weights[0].numel() + view.stage_weights[0].numel()
        size = max(MOST_WEIGHTS // width, 1)
        starts = range(0, len(view.num_micro_batches), size)
        parts = [view.rows(slice(start, start + size)) for start in starts]
        return {term.path: torch.cat([term(part) for part in parts]) for term in self.terms}


def stage_part(own: Tensors, like: Tensor) -> Tensor:
    """Return the seconds that terms add to each micro-batch of every stage, shape of `like`."""
    parts = [added for added in own.values() if added.dim() == like.dim()]
    return sum(parts, torch.zeros_like(like))


def lengthened(forward: Tensor, backward: Tensor, added: Tensor) -> BothPasses:
    """Return passes that are longer by `added` together, in proportion to their seconds, `(B, K)`."""
    factor = 1.0 + added / (forward + backward).clamp(min=LEAST_SECONDS)
    return forward * factor, backward * factor


def _sample(view: PlanView) -> PlanView:
    """Return the first plan twice, the second time with more seconds and bytes."""
    first = view.rows(slice(1))
    rows = {}
    for name in BY_PLAN:
        value = getattr(first, name).detach()
        more = 1.0 if name.endswith("_weights") else LONGER
        rows[name] = torch.cat([value, more * value])
    return first.changed(rows)


@cache
def load_terms(paths: tuple[str, ...]) -> tuple[OwnTerm, ...]:
    """Import the functions of `cost.term`, once in a process.

    Errors:
        ConfigError: there is no such function.
    """
    terms = []
    for path in paths:
        function = load_function("cost.term", path)
        terms.append(OwnTerm(path, function, bool(getattr(function, "non_negative", False))))
    return tuple(terms)
