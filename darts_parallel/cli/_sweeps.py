"""Answer what Hydra asks in a sweep: the folder of a job, and what follows the last job."""

import re
import sys
import time
from collections.abc import Sequence
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from darts_parallel.config import given_values, user_errors

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
    """Name the folder of a job by its number and what is swept, in characters for folders.

    Swept keys have several values in the command. A process that knows no command names all keys.
    """
    swept = {key for key, value in given_values(sys.argv).items() if re.search("[,(]", value)}
    known = [override for override in overrides if override.partition("=")[0] in swept]
    text = ",".join(known or overrides)
    name = "".join(c if c.isalnum() or c in "-_.,=+[]" else "_" for c in text)
    return f"{number},{name[:LONGEST_NAME]}"
