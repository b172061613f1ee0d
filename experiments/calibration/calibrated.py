"""The file of fitted parameters: values by device, stack and link, and where they come from."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import log
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor

from darts_parallel.errors import ConfigError
from darts_parallel.plan.file import write_text
from experiments.calibration.parameters import KNOWN, QUANTITIES, UNKNOWN_SHARE, Parameters, Place, Quantity

SHIPPED = Path(__file__).parent / "calibrated.yaml"
BASE = "base"
"""Key of a value that holds for names without runs; for a share of something known, the logit's offset."""


@dataclass(frozen=True)
class Calibrated:
    """Fitted values by quantity and name."""

    values: dict[str, dict[str, float]]

    def at(self, place: Place) -> dict[str, Tensor]:
        """Value of every quantity at a place; a name without runs takes the base."""
        return {
            q.name: torch.tensor(self.value(q, place.of(q.scope)), dtype=torch.float64) for q in QUANTITIES
        }

    def value(self, quantity: Quantity, name: str) -> float:
        """Value of one quantity for one name of its scope."""
        known = self.values[quantity.name]
        if name in known:
            return known[name]
        if quantity.name not in KNOWN:
            return known[BASE]
        prior = KNOWN[quantity.name].get(name, UNKNOWN_SHARE)
        return float(
            torch.sigmoid(torch.tensor(known[BASE] + log(prior / (1.0 - prior)), dtype=torch.float64))
        )

    @staticmethod
    def read(path: Path = SHIPPED) -> "Calibrated":
        """Read a file that `write` wrote.

        Errors:
            ConfigError: it is not there, or a quantity is missing.
        """
        if not path.is_file():
            raise ConfigError(f"parameters={path} must be a file; nearest legal: {SHIPPED}.")
        data: Any = OmegaConf.to_container(OmegaConf.load(path))
        for quantity in QUANTITIES:
            if BASE not in data.get("values", {}).get(quantity.name, {}):
                raise ConfigError(
                    f"parameters={path} lacks values.{quantity.name}.{BASE}; nearest legal: a file that "
                    "python -m experiments.calibrate wrote."
                )
        return Calibrated(
            {q.name: {k: float(v) for k, v in data["values"][q.name].items()} for q in QUANTITIES}
        )

    @staticmethod
    def of_fit(parameters: Parameters, latent: Tensor, places: Iterable[Place]) -> "Calibrated":
        """The values at a fit's optimum."""
        everywhere = list(places)
        values: dict[str, dict[str, float]] = {}
        for quantity in parameters.quantities:
            base = latent[parameters.index[quantity.name, ""]]
            known = quantity.name in KNOWN
            start = float(base) if known else float(parameters.value(latent, quantity, ""))
            values[quantity.name] = {BASE: start}
            if quantity.scope != "all":
                for name in sorted({place.of(quantity.scope) for place in everywhere}):
                    values[quantity.name][name] = float(parameters.value(latent, quantity, name))
        return Calibrated(values)

    def write(self, path: Path, provenance: Iterable[str]) -> None:
        """Write the file, with its provenance as comments."""
        lines = [f"# {line}" for line in provenance] + ["values:"]
        for quantity in QUANTITIES:
            cells = [f"{name}: {value:.4g}" for name, value in self.values[quantity.name].items()]
            lines += [f"  # {quantity.meaning}", f"  {quantity.name}:", *(f"    {cell}" for cell in cells)]
        write_text(path, "\n".join(lines) + "\n")
