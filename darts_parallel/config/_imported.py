"""A model that a Hugging Face file gives, and the advice where it gives none."""

from dataclasses import dataclass

from darts_parallel.errors import Entries

OWN_FILE = (
    "try a model file of your own (--config-dir) with what darts_parallel/config/model.py lists"
)


@dataclass(frozen=True)
class Imported:
    """A model that `transformers` built from a file: its fields, parameters and FLOP."""

    place: str
    fields: Entries
    parameters: int
    """Trained parameters, tied tables counted once."""
    flop: float
    """FLOP of the matrix products of a forward pass over `tokens`."""
    tokens: int
    blocks: tuple[tuple[str, int], ...]
    """Path and class, and parameters of every block."""
