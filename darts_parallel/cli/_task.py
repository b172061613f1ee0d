"""One job of the command in its folder; what it imports takes seconds."""

from collections.abc import Sequence
from math import inf

import torch
from rich.console import Console

from darts_parallel.cli._job import Job
from darts_parallel.cli._run_folder import OVERRIDES, RunFolder
from darts_parallel.config import Config, leave_pipe
from darts_parallel.export import require_trainers
from darts_parallel.planner import choose_nodes
from darts_parallel.plans import write_json
from darts_parallel.problem import Problem
from darts_parallel.report import seconds as seconds_label

PIPED_WIDTH = 100


class PipedConsole(Console):
    """A console that is wide in a pipe, where rich assumes 80 columns.

    The command goes on without a word where the reader of its pipe has gone, as behind `| head`.
    """

    def __init__(self, *, quiet: bool) -> None:
        super().__init__(quiet=quiet)
        if not self.is_terminal:
            self.width = max(self.width, PIPED_WIDTH)

    def on_broken_pipe(self) -> None:
        """Write the files all the same; rich would end the process here."""
        leave_pipe()


def run_in(folder: RunFolder, config: Config, given: Sequence[str], *, swept: bool) -> float:
    """Run a job in its folder, which is as before where the job ends without a result.

    Args:
        given: Overrides of the command.
        swept: The job is one of a sweep, and prints one line.

    Returns:
        Seconds per iteration, for sweepers; infinite where the plan does not fit.
    """
    # small tensors: threads cost more than they bring, and sums keep one order
    torch.set_num_threads(1)
    problem, rental = choose_nodes(Problem.from_config(config))
    require_trainers(problem)
    folder.require_writable()
    if swept:
        write_json(folder.path / OVERRIDES, given)
    found = Job(problem, folder.path, PipedConsole(quiet=swept), rental, given).run()
    if not swept:
        return 0.0
    words = seconds_label(found) if found < inf else "does not fit"
    print(f"{folder.path.name}: {words}", flush=True)
    return found
