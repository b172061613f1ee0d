"""Answer what Hydra asks in a sweep: the folder of a job, and what follows the last job."""

import time
from collections.abc import Sequence
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from darts_parallel.config import user_errors

LONGEST_NAME = 150
"""Characters of a job's folder; most file systems allow 255."""


class SweepTable(Callback):
    """Hydra's callback at the end of a sweep: prints the table and writes it."""

    def on_multirun_start(self, config: DictConfig, **settings: Any) -> None:
        """Note when the sweep begins: its folder may hold jobs of earlier ones."""
        self.began = time.time()

    def on_multirun_end(self, config: DictConfig, **settings: Any) -> None:
        """Write the table; its imports are slow, and Hydra makes the callback before each job."""
        from darts_parallel.cli._sweep_table import write_sweep

        with user_errors(()):
            write_sweep(config, self.began)


def sweep_folder(number: int, overrides: Sequence[str]) -> str:
    """Name the folder of a job by its number and overrides, in characters for folders."""
    text = ",".join(override.lstrip("+") for override in overrides)
    name = "".join(c if c.isalnum() or c in "-_.,=+[]" else "_" for c in text)
    # what is swept usually stands last
    kept = name[-LONGEST_NAME:]
    if len(name) > LONGEST_NAME:  # begin with a whole override
        kept = kept.partition(",")[2] or kept
    return f"{number},{kept}"
