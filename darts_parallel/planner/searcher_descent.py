"""The products dp x tp x pp searched by gradient: who gets each prime factor of the number of GPUs.

Three degrees relaxed each for itself would leave the product open. Here every prime factor has weights over
(dp, tp, pp), a softmax of its own; a degree is the product of the factors to the power of its weights, so
that `dp * tp * pp` is the number of GPUs whatever the weights, and at one-hot weights the degrees are whole.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from darts_parallel.config.search import SearchConfig
from darts_parallel.cost.searcher import SearcherModel
from darts_parallel.gradient.adam import Adam
from darts_parallel.gradient.relaxation import Schedules, geometric
from darts_parallel.gradient.step_record import StepRecord

OWNERS = ("dp", "tp", "pp")
Product = tuple[int, int, int]


def prime_factors(number: int) -> list[int]:
    """Prime factors with their multiplicity, rising; of 1: none."""
    found, factor = [], 2
    while factor * factor <= number:
        if number % factor:
            factor += 1
        else:
            found.append(factor)
            number //= factor
    return found + ([number] if number > 1 else [])


def relaxed_degrees(weights: Tensor, factors: Tensor) -> Tensor:
    """Degrees of relaxed products.

    Args:
        weights: Of every factor's owners, summing to 1, shape `(..., J, 3)`.
        factors: Prime factors, `(J,)`.

    Returns:
        dp, tp and pp, `(..., 3)`; their product is that of the factors.
    """
    return torch.exp((weights * factors.log().unsqueeze(-1)).sum(-2))


@dataclass
class ProductSearch:
    """Descent on relaxed products, and what it met on the way.

    Attributes:
        model: Prices degrees.
        devices: Number of GPUs.
        config: Steps, restarts, temperatures, learning rate.
        runs: Whether a product has a plan that is legal and fits.
        seen: Seconds of every product that was priced.
    """

    model: SearcherModel
    devices: int
    config: SearchConfig
    runs: Callable[[Product], bool]
    seen: dict[Product, float] = field(default_factory=dict)
    history: list[StepRecord] = field(default_factory=list)

    @property
    def best(self) -> Product | None:
        """The fastest product met that runs."""
        return next((p for p in sorted(self.seen, key=lambda p: (self.seen[p], p)) if self.runs(p)), None)

    def price(self, products: list[Product]) -> None:
        """Score the products that are new."""
        new = [product for product in dict.fromkeys(products) if product not in self.seen]
        if new:
            degrees = torch.tensor(new, dtype=torch.float64).unbind(1)
            seconds = torch.stack(list(self.model.terms(*degrees).values())).sum(0)
            self.seen |= zip(new, seconds.tolist(), strict=True)

    def descend(self, seed: int, on_record: Callable[[StepRecord], None] = lambda record: None) -> None:
        """Take all steps from random preferences of every factor, and price what the weights round to."""
        c, primes = self.config, prime_factors(self.devices)
        rng = torch.Generator().manual_seed(seed)
        factors = torch.tensor(primes, dtype=torch.float64)
        shape = (c.num_restarts, len(primes), 3)
        logits = c.initial_noise * torch.randn(shape, generator=rng, dtype=torch.float64)
        preferred = torch.randint(3, (*shape[:2], 1), generator=rng)
        logits.scatter_add_(-1, preferred, torch.full((*shape[:2], 1), c.initial_preference).double())
        logits.requires_grad_()
        optimizer = Adam([(logits, c.learning_rate)], betas=(c.adam_betas[0], c.adam_betas[1]))
        for step in range(c.num_steps):
            temperature = geometric(c.temperature[0], c.temperature[1], step, c.num_steps)
            weights = torch.softmax(logits / temperature, dim=-1)
            degrees = relaxed_degrees(weights, factors)
            seconds = torch.stack(list(self.model.terms(*degrees.unbind(-1)).values())).sum(0)
            optimizer.zero_grad()
            seconds.log().sum().backward()  # type: ignore[no-untyped-call]
            if step % c.record_every == 0 or step == c.num_steps - 1:
                self.price([_rounded(row, primes) for row in weights.argmax(-1).tolist()])
                record = self._record(step, temperature, weights.detach(), seconds.detach())
                self.history.append(record)
                on_record(record)
            optimizer.step()

    def _record(self, step: int, temperature: float, weights: Tensor, seconds: Tensor) -> StepRecord:
        """The leading restart at a step."""
        lead, best = int(seconds.argmin()), self.best
        mine, primes = weights[lead], prime_factors(self.devices)
        logs = (mine * torch.tensor(primes).double().log().unsqueeze(-1)).sum(0)
        shares = logs / logs.sum().clamp(min=1e-30)
        none = torch.zeros(0, dtype=torch.float64)
        return StepRecord(
            step=step,
            seconds=0.0,
            schedules=Schedules(temperature, temperature, 1.0),
            loss=float(seconds[lead].log()),
            surrogate_time_s=float(seconds[lead]),
            best_time_s=float("inf") if best is None else self.seen[best],
            entropy=float(-(mine * mine.clamp(min=1e-30).log()).sum(-1).mean()) if primes else 0.0,
            outer_weights=dict(zip(OWNERS, shares.tolist(), strict=True)),
            pp=round(float(logs[2].exp())),
            choices=OWNERS,
            probabilities=mine,
            memory=none,
            capacity=none,
            multipliers=none,
            stage_seconds=none,
            rows=tuple(f"factor {prime}" for prime in primes),
        )

    def polish(self) -> None:
        """Move and exchange prime factors from the fastest products on, until none is left that may help.

        Expanded is every product that is faster than the best that runs, whether it runs or not (what fits
        may lie behind what does not), and the best itself.
        """
        expanded: set[Product] = set()
        while True:
            best = self.best
            limit = float("inf") if best is None else self.seen[best]
            left = [p for p, seconds in self.seen.items() if seconds <= limit and p not in expanded]
            if not left:
                return
            expanded |= set(left)
            self.price([near for product in left for near in neighbours(product)])


def _rounded(owners: list[int], primes: list[int]) -> Product:
    """The product in which every prime factor goes to its owner."""
    dp, tp, pp = (prod(p for p, own in zip(primes, owners, strict=True) if own == o) for o in range(3))
    return dp, tp, pp


def neighbours(product: Product) -> Iterator[Product]:
    """Products with one prime factor at another degree, or with two factors of two degrees exchanged."""
    for source in range(3):
        for target in range(3):
            given = sorted(set(prime_factors(product[source]))) if source != target else []
            taken = [1, *sorted(set(prime_factors(product[target])))]
            for factor in given:
                for back in taken:
                    changed = list(product)
                    changed[source] = changed[source] // factor * back
                    changed[target] = changed[target] // back * factor
                    yield changed[0], changed[1], changed[2]
