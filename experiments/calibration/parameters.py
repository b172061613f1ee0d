"""The few physical parameters that are fitted, and what is known of them before any run (`priors.yaml`).

The value of a parameter for one place is a base that all share plus deviations of the device, of the
framework, of the link and of their pairs; a name that was not in the data has the rest alone. Priors are
normal on an unbounded scale, so that many runs move a deviation and few leave it to what it is a deviation
from.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import log
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from darts_parallel.planner import BASE, FAMILIES
from experiments.data.runs import DEVICE, MeasuredRun

PAIR = "+"
"""Joins the scopes of a pair, and their names."""
Key = tuple[str, str, str]
"""Quantity, scope (empty: the base) and name of one latent number."""


@dataclass(frozen=True)
class Place:
    """Names that a run's parameters depend on."""

    device: str
    framework: str
    intra: str
    inter: str
    memory_metric: str = DEVICE

    @staticmethod
    def of_run(run: MeasuredRun) -> "Place":
        """Return the place of a run; of several kinds of nodes the first counts."""
        device = FAMILIES.get(run.devices[0], run.devices[0])
        return Place(device, run.framework, run.intra_links[0], run.inter_links[0], run.memory_metric)

    def name(self, scope: str) -> str:
        """Return the name within a scope, or two joined by `+`."""
        return PAIR.join(str(getattr(self, part)) for part in scope.split(PAIR))


@dataclass(frozen=True)
class Quantity:
    """A fitted quantity: where it applies, its prior and how far single devices or frameworks may be off."""

    name: str
    meaning: str
    value: float
    """Prior value; where `known` lists names, that of the others."""
    sd: Mapping[str, float]
    """Standard deviations on the unbounded scale, of the base and by scope."""
    share: bool = False
    """In (0, 1); else any number above `above`."""
    above: float = 0.0
    experts: bool = False
    """Only mixtures of experts depend on it; it is all that runs of mixtures are fitted by."""
    known: Mapping[str, Any] = field(default_factory=dict)
    """Scope, and prior values by the names in it."""

    def keys(self, place: Place) -> list[Key]:
        """List the latent numbers whose sum is the quantity at a place."""
        return [
            (self.name, "", "") if scope == BASE else (self.name, scope, place.name(scope))
            for scope in self.sd
        ]

    def at(self, place: Place, x: Tensor) -> Tensor:
        """Return the value whose distance from the prior of a place is `x` on the unbounded scale."""
        prior = self.value
        if self.known:
            prior = self.known["values"].get(place.name(self.known["scope"]), prior)
        if self.share:
            return torch.sigmoid(x + log(prior / (1.0 - prior)))
        return self.above + prior * torch.exp(x)


def read_quantities() -> tuple[Quantity, ...]:
    """Read `priors.yaml`."""
    text = (Path(__file__).parents[1] / "data" / "priors.yaml").read_text(encoding="utf-8")
    entries: dict[str, Any] = yaml.safe_load(text)  # type: ignore[no-untyped-call]
    return tuple(
        Quantity(name, own["meaning"], **own["prior"], known=own.get("known", {}))
        for name, own in entries.items()
    )


QUANTITIES = read_quantities()


class Parameters:
    """Index of all latent numbers: one base for each quantity, one deviation for each name in its scopes."""

    def __init__(self, places: Iterable[Place], quantities: tuple[Quantity, ...] = QUANTITIES) -> None:
        self.quantities = quantities
        everywhere = list(places)
        sds: dict[Key, float] = {}
        for quantity in quantities:
            for scope, sd in quantity.sd.items():
                names = [""] if scope == BASE else sorted({place.name(scope) for place in everywhere})
                sds |= {(quantity.name, "" if scope == BASE else scope, name): sd for name in names}
        self.keys = list(sds)
        self.sd = torch.tensor(list(sds.values()), dtype=torch.float64)
        self.index = {key: i for i, key in enumerate(self.keys)}
        own = {quantity.name for quantity in quantities if quantity.experts}
        self.of_experts = torch.tensor([key[0] in own for key in self.keys])
        """Latent numbers that runs of mixtures are fitted by, `(P,)`."""

    def __len__(self) -> int:
        return len(self.keys)

    def zero(self) -> Tensor:
        """Return the prior's mean: every latent number is an offset to it."""
        return torch.zeros(len(self), dtype=torch.float64)

    def values(self, latent: Tensor, place: Place) -> dict[str, Tensor]:
        """Compute every quantity at a place, differentiable in `latent`; unknown names are left out."""
        return {q.name: self.value(latent, q, place) for q in self.quantities}

    def value(self, latent: Tensor, quantity: Quantity, place: Place) -> Tensor:
        """Compute one quantity at a place."""
        members = [self.index[key] for key in quantity.keys(place) if key in self.index]
        return quantity.at(place, latent[members].sum())
