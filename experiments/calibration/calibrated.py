"""The few physical parameters that are fitted, and the file of their values by device, framework and link.

`conf/calibrated.yaml`, with the correlation of its numbers in an `.npz` next to it, serves validation, the
device, cluster and framework files that the search reads, and the intervals of its answers
(`darts_parallel.planner.figure_posterior` reads the posterior).

What is known of them before any run stands in `priors.yaml`. The value of a parameter for one place is a
base that all share plus deviations of the device, of the framework, of the link and of their pairs; a name
that was not in the data has the rest alone. Priors are normal on an unbounded scale, so that many runs move
a deviation and few leave it to what it is a deviation from.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import log
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from darts_parallel.config import config_dir, read_yaml
from darts_parallel.cost import Tensors, float_tensor
from darts_parallel.errors import ConfigError, Entries
from darts_parallel.planner import BASE, LatentKey, correlation_bytes, latent_numbers
from darts_parallel.plans import write_bytes, write_text
from experiments.data import DATA
from experiments.data.runs import DEVICE, MeasuredRun

OF_MEMORY = ("reserved_GiB", "state_factor", "activation_factor")
"""Quantities that bytes alone depend on."""
PAIR = "+"
"""Joins the scopes of a pair, and their names."""


@dataclass(frozen=True)
class Place:
    """Names that a run's parameters depend on."""

    device: str
    framework: str
    intra: str
    inter: str
    memory_metric: str = DEVICE
    base = ""
    """The one name in the scope `BASE`, which all places share."""

    @staticmethod
    def of_run(run: MeasuredRun) -> "Place":
        """Return the place of a run; of several kinds of nodes the first counts."""
        device = run.device_family
        return Place(
            device, run.framework, run.intra_links[0], run.inter_links[0], run.memory_metric
        )

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
    unseen: Mapping[str, float] = field(default_factory=dict)
    """Standard deviations of what has no runs, by scope, where they are wider than those of the fit."""
    known: Sequence[Mapping[str, Any]] = ()
    """Scopes, and prior values by the names in them; the first that has a place's name counts."""

    def keys(self, place: Place) -> list[LatentKey]:
        """List the latent numbers whose sum is the quantity at a place."""
        return [(self.name, scope, place.name(scope)) for scope in self.sd]

    def prior(self, place: Place) -> float:
        """Return what is known of a place before any run."""
        found = (own["values"].get(place.name(own["scope"])) for own in self.known)
        return next((float(value) for value in found if value is not None), self.value)

    def at(self, place: Place, x: Tensor) -> Tensor:
        """Return the value whose distance from the prior of a place is `x` on the unbounded scale."""
        prior = self.prior(place)
        if self.share:
            return torch.sigmoid(x + log(prior / (1.0 - prior)))
        return self.above + prior * torch.exp(x)


def read_quantities() -> tuple[Quantity, ...]:
    """Read `priors.yaml`."""
    entries = read_yaml(DATA / "priors.yaml")
    found = []
    for name, own in entries.items():
        known = own.get("known", ())
        found.append(Quantity(name, own["meaning"], **own["prior"], known=known))
    return tuple(found)


QUANTITIES = read_quantities()


class Parameters:
    """Index of all latent numbers: one base for each quantity, one deviation for each name in its scopes."""

    def __init__(
        self, places: Iterable[Place], quantities: tuple[Quantity, ...] = QUANTITIES
    ) -> None:
        self.quantities = quantities
        everywhere = list(places)
        sds: dict[LatentKey, float] = {}
        for quantity in quantities:
            for scope, sd in quantity.sd.items():
                names = sorted({place.name(scope) for place in everywhere})
                sds |= {(quantity.name, scope, name): sd for name in names}
        self.keys = list(sds)
        self.sd = float_tensor(list(sds.values()))
        wider = {(q.name, scope): sd for q in quantities for scope, sd in q.unseen.items()}
        unseen = [wider.get(key[:2], sd) for key, sd in sds.items()]
        self.unseen_sd = float_tensor(unseen)
        """Standard deviations where no run says anything, `(P,)`."""
        self.index = {key: i for i, key in enumerate(self.keys)}
        own = {quantity.name for quantity in quantities if quantity.experts}
        self.of_experts = torch.tensor([key[0] in own for key in self.keys])
        """Latent numbers that runs of mixtures are fitted by, `(P,)`."""

    def __len__(self) -> int:
        return len(self.keys)

    def zero(self) -> Tensor:
        """Return the prior's mean: every latent number is an offset to it."""
        return torch.zeros(len(self), dtype=torch.float64)

    def averaged(self, latent: Tensor) -> Tensor:
        """Return the latent numbers with no deviation of a framework in the quantities of seconds."""
        of_memory = torch.tensor([key[0] in OF_MEMORY for key in self.keys])
        shared = torch.tensor(["framework" not in key[1] for key in self.keys])
        return torch.where(of_memory | shared, latent, 0.0)

    def values(self, latent: Tensor, place: Place) -> Tensors:
        """Compute every quantity at a place, differentiable in `latent`; unknown names are left out."""
        return {q.name: self.value(latent, q, place) for q in self.quantities}

    def value(self, latent: Tensor, quantity: Quantity, place: Place) -> Tensor:
        """Compute one quantity at a place."""
        members = [self.index[key] for key in quantity.keys(place) if key in self.index]
        return quantity.at(place, latent[members].sum())


SHIPPED = config_dir() / "calibrated.yaml"


@dataclass(frozen=True)
class Calibrated:
    """Fitted latent numbers."""

    numbers: Mapping[LatentKey, tuple[float, float]]
    """Mean and posterior standard deviation."""

    def at(self, place: Place) -> Tensors:
        """Compute every quantity at a place; what had no runs stays at what it is a deviation from."""
        values = {}
        for quantity in QUANTITIES:
            parts = [self.mean(*key) for key in quantity.keys(place)]
            values[quantity.name] = quantity.at(place, float_tensor(sum(parts)))
        return values

    def latent(self, parameters: Parameters) -> Tensor:
        """Return these numbers in the order of `parameters`, 0 for those that are not among them."""
        return float_tensor([self.mean(*key) for key in parameters.keys])

    def mean(self, quantity: str, scope: str, name: str) -> float:
        """Return a base or a deviation on the unbounded scale; 0 where there were no runs."""
        return self.numbers.get((quantity, scope, name), (0.0, 0.0))[0]

    def names(self, scope: str) -> list[str]:
        """List the names of a scope that have a deviation."""
        return sorted({name for _, own, name in self.numbers if own == scope})

    @staticmethod
    def read(path: Path = SHIPPED) -> "Calibrated":
        """Read a file that `write_fit` wrote.

        Errors:
            ConfigError: it is not there, or a quantity is missing.
        """
        if not path.is_file():
            raise ConfigError(f"parameters={path} must be a file; try {SHIPPED}.")
        data = read_yaml(path) or {}
        quantities = data.get("quantities", {}) if isinstance(data, dict) else {}
        for quantity, key in product(QUANTITIES, (BASE, "prior_sd")):
            if key not in quantities.get(quantity.name, {}):
                raise ConfigError(
                    f"parameters={path} lacks quantities.{quantity.name}.{key}; try a file that "
                    "python -m experiments.calibrate wrote."
                )
        return Calibrated(latent_numbers(quantities))


def write_fit(
    path: Path,
    parameters: Parameters,
    latent: Tensor,
    covariance: Tensor,
    provenance: Iterable[str],
    spread: Entries,
) -> None:
    """Write the latent numbers of a fit, with its provenance as comments, and their correlation.

    Args:
        covariance: Of the latent numbers, `(P, P)`.
        spread: Widths (`folds.spreads`), for intervals; they widen the standard deviations.
    """
    wider = {part: own.get("widening", 1.0) ** 0.5 for part, own in spread.items()}

    def widen(quantity: str) -> float:
        return float(wider.get("memory" if quantity in OF_MEMORY else "seconds", 1.0))

    quantities: dict[str, Entries] = {}
    for q in QUANTITIES:
        entry: Entries = {"meaning": q.meaning}
        entry["scale"] = "share" if q.share else {"above": q.above}
        entry["prior"] = q.value
        factor = widen(q.name)
        spreads = {**q.sd, **q.unseen}.items()
        entry["prior_sd"] = {name: float(f"{sd * factor:.3g}") for name, sd in spreads}
        quantities[q.name] = entry
    sds = torch.diagonal(covariance).sqrt()
    numbers = zip(parameters.keys, latent.tolist(), sds.tolist(), strict=True)
    for (quantity, scope, name), mean, sd in numbers:
        pair = [float(f"{mean:.4g}"), float(f"{sd * widen(quantity):.3g}")]
        if scope == BASE:
            quantities[quantity][BASE] = pair
        else:
            quantities[quantity].setdefault(scope, {})[name] = pair
    lines = [f"# {line}" for line in provenance]
    lines.append(
        "# quantities: mean and widened standard deviation on the unbounded scale; correlation: .npz"
    )
    data = {"spread": spread, "quantities": quantities}
    style: Entries = {"sort_keys": False, "default_flow_style": None, "width": 120}
    text = yaml.safe_dump(data, **style)  # type: ignore[no-untyped-call]
    write_text(path, "\n".join(lines) + f"\n{text}")
    correlation = covariance / torch.outer(sds, sds)
    write_bytes(path.with_suffix(".npz"), correlation_bytes(correlation))
