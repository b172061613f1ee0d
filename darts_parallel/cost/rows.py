"""Records of equally many rows: batches of plans and of their figures."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

Own = TypeVar("Own", bound="Rows")


def flatnonzero(mask: Tensor) -> Tensor:
    """Return the places of the true elements of a mask, `(N,)`, as numpy's function does."""
    return torch.nonzero(mask).flatten()


@dataclass(frozen=True)
class Rows:
    """Select and join rows; every field is a tensor of rows, or a record of them."""

    def __len__(self) -> int:
        return len(next(iter(vars(self).values())))

    def __getitem__(self: Own, index: Tensor | slice) -> Own:
        return replace(self, **{name: rows[index] for name, rows in vars(self).items()})

    @staticmethod
    def concatenate(parts: Sequence[Own]) -> Own:
        """Return all rows of `parts`, in order."""
        columns = {name: torch.cat([vars(part)[name] for part in parts]) for name in vars(parts[0])}
        return replace(parts[0], **columns)
