"""The file of fitted parameters: latent numbers by device, software and link, and how sure they are.

One file, `conf/calibrated.yaml`, serves validation, the device, cluster and software files that the search
reads, and the intervals of its answers (`darts_parallel.report.uncertainty` reads the posterior).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from darts_parallel.config.schema import config_dir
from darts_parallel.errors import ConfigError
from darts_parallel.plan.file import write_text
from darts_parallel.report.uncertainty import pack_correlation
from experiments.calibration.parameters import (
    KNOWN,
    QUANTITIES,
    Key,
    Parameters,
    Place,
    Quantity,
    on_scale,
    prior_at,
)

SHIPPED = Path(config_dir()) / "calibrated.yaml"
BASE = "base"


@dataclass(frozen=True)
class Calibrated:
    """Fitted latent numbers, each with its standard deviation, and their correlation."""

    keys: tuple[Key, ...]
    mean: Tensor
    """Shape `(P,)`."""
    sd: Tensor
    """Posterior standard deviations, `(P,)`."""
    correlation: Tensor
    """Shape `(P, P)`."""

    @property
    def index(self) -> dict[Key, int]:
        """Place of every latent number."""
        return {key: i for i, key in enumerate(self.keys)}

    def at(self, place: Place) -> dict[str, Tensor]:
        """Value of every quantity at a place; what had no runs stays at what it is a deviation from."""
        index = self.index
        return {q.name: torch.tensor(self._value(q, place, index), dtype=torch.float64) for q in QUANTITIES}

    def value(self, quantity: Quantity, place: Place) -> float:
        """Value of one quantity at a place."""
        return self._value(quantity, place, self.index)

    def _value(self, quantity: Quantity, place: Place, index: dict[Key, int]) -> float:
        keys = [(quantity.name, "", "")]
        keys += [(quantity.name, scope, place.of(scope)) for scope, _ in quantity.deviations]
        x = sum(float(self.mean[index[key]]) for key in keys if key in index)
        return float(on_scale(quantity, prior_at(quantity, place), torch.tensor(x, dtype=torch.float64)))

    def latent(self, parameters: Parameters) -> Tensor:
        """These numbers in the order of `parameters`, 0 for those that are not among them."""
        index = self.index
        found = [float(self.mean[index[key]]) if key in index else 0.0 for key in parameters.keys]
        return torch.tensor(found, dtype=torch.float64)

    def deviation(self, quantity: str, scope: str, name: str) -> float:
        """A deviation on the unbounded scale; 0 where there were no runs."""
        place = self.index.get((quantity, scope, name))
        return 0.0 if place is None else float(self.mean[place])

    def names(self, scope: str) -> list[str]:
        """Names of a scope that have a deviation."""
        return sorted({name for _, own, name in self.keys if own == scope})

    @staticmethod
    def read(path: Path = SHIPPED) -> "Calibrated":
        """Read a file that `write` wrote.

        Errors:
            ConfigError: it is not there, or a quantity is missing.
        """
        if not path.is_file():
            raise ConfigError(f"parameters={path} must be a file; nearest legal: {SHIPPED}.")
        data: Any = yaml.safe_load(path.read_text(encoding="utf-8")) or {}  # type: ignore[no-untyped-call]
        quantities = data.get("quantities", {}) if isinstance(data, dict) else {}
        keys: list[Key] = []
        numbers: list[list[float]] = []
        for quantity in QUANTITIES:
            own = quantities.get(quantity.name, {})
            if BASE not in own:
                raise ConfigError(
                    f"parameters={path} lacks quantities.{quantity.name}.{BASE}; nearest legal: a file that "
                    "python -m experiments.calibrate wrote."
                )
            keys.append((quantity.name, "", ""))
            numbers.append(own[BASE])
            for scope, _ in quantity.deviations:
                for name, pair in own.get(scope, {}).items():
                    keys.append((quantity.name, scope, name))
                    numbers.append(pair)
        table = torch.tensor(numbers, dtype=torch.float64)
        return Calibrated(tuple(keys), table[:, 0], table[:, 1], torch.eye(len(keys), dtype=torch.float64))

    @staticmethod
    def of_fit(parameters: Parameters, latent: Tensor, covariance: Tensor | None = None) -> "Calibrated":
        """The values at a fit's optimum.

        Args:
            covariance: Of the latent numbers, `(P, P)`; the prior's without it.
        """
        spread = torch.diag(parameters.sd**2) if covariance is None else covariance
        sd = torch.diagonal(spread).sqrt()
        return Calibrated(tuple(parameters.keys), latent, sd, spread / (sd.unsqueeze(0) * sd.unsqueeze(1)))

    def write(self, path: Path, provenance: Iterable[str], spread: dict[str, Any]) -> None:
        """Write the file, with its provenance as comments.

        Args:
            spread: Residual spreads and interval factors (`coverage.py`), for the intervals of answers.
        """
        lines = [f"# {line}" for line in provenance]
        text = yaml.safe_dump({"spread": spread}, sort_keys=False)  # type: ignore[no-untyped-call]
        lines += [text.rstrip(), "quantities:"]
        lines.insert(
            len(lines) - 1, "# latent mean and standard deviation, on the unbounded scale of each quantity"
        )
        for quantity in QUANTITIES:
            scale = "share" if quantity.share else f"{{above: {quantity.offset:g}}}"
            lines += [f"  # {quantity.meaning}", f"  {quantity.name}:", f"    scale: {scale}"]
            lines += [f"    prior: {_prior(quantity)}"]
            sds = {BASE: quantity.base_sd} | dict(quantity.deviations)
            lines += [f"    prior_sd: {_flow(sds)}", f"    {BASE}: {self._pair((quantity.name, '', ''))}"]
            for scope, _ in quantity.deviations:
                own = [key for key in self.keys if key[:2] == (quantity.name, scope)]
                if own:
                    lines += [f"    {scope}:", *(f"      {key[2]}: {self._pair(key)}" for key in own)]
        lines += [
            "# correlation of the numbers above in their order: lower triangle, steps of 1/127, zlib, base85"
        ]
        lines += ["correlation: " + pack_correlation(self.correlation)]
        write_text(path, "\n".join(lines) + "\n")

    def _pair(self, key: Key) -> str:
        place = self.index[key]
        return f"[{float(self.mean[place]):.4g}, {float(self.sd[place]):.3g}]"


def _prior(quantity: Quantity) -> str:
    if quantity.name not in KNOWN:
        return f"{quantity.prior:g}"
    scope, table = KNOWN[quantity.name]
    return f"{{scope: {scope}, others: {quantity.prior:g}, {_flow(table)[1:]}"


def _flow(values: dict[str, float] | Sequence[tuple[str, float]]) -> str:
    return "{" + ", ".join(f"{key}: {value:g}" for key, value in dict(values).items()) + "}"
