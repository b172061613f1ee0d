"""Configuration files that are parsed once a process: Hydra parses the same ones for every configuration."""

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from typing import IO, Any
from unittest.mock import patch

from omegaconf import OmegaConf


@contextmanager
def parse_once() -> Iterator[None]:
    """Let `OmegaConf.load` remember by the text what it made of an open file; every caller gets a copy."""
    load = OmegaConf.load
    known: dict[str, bytes] = {}

    def remembered(file: IO[str]) -> Any:
        if not hasattr(file, "read"):
            return load(file)
        text = file.read()
        if text not in known:
            try:
                known[text] = pickle.dumps(load(StringIO(text)))
            except Exception:  # its error names the file
                file.seek(0)
                return load(file)
        return pickle.loads(known[text])

    with patch.object(OmegaConf, "load", remembered):
        yield
