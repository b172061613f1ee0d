"""How far is the pipeline's closed form from the schedule itself?

    python -m experiments.schedules                    # all cells, 400 random pipelines each
    python -m experiments.schedules pipelines=50       # a first look

Random pipelines: forward and backward seconds of every stage are drawn apart, uniformly within
`1 - unevenness` and `1 + unevenness` times 1 and 2, a message one way costs a share of a stage's mean
seconds. The closed form `sum_k t_k + (m - 1) max_k t_k` (messages charged to the later stage) is compared
with the simulated 1F1B schedule, where messages block or overlap. Its error is
`closed form / simulated - 1`: above 0 it is too slow. It prints Markdown tables; `out=FILE` writes them, and
`publish=true` the page of results.
"""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from darts_parallel.config.checks import require_at_least, require_at_most
from darts_parallel.config.options import run_main
from darts_parallel.cost.pipeline import pipeline_seconds
from darts_parallel.cost.simulation import PassSeconds, device_ends
from darts_parallel.report.tables import markdown_table
from experiments.results_page import publish

METHOD = """Random pipelines of about 1 s forward and 2 s backward a stage, each factor uniform within `1
-/+ unevenness`, 400 of a kind; error of `sum_k t_k + (m - 1) max_k t_k` against the simulated 1F1B schedule
in percent: median (smallest to largest). Above 0 the closed form is too slow. It is exact for equal stages;
unequal stages drain faster than it says, and where messages overlap with computation it still charges them
to the later stage."""


@dataclass
class ScheduleOptions:
    """Which random pipelines."""

    pp: list[int] = field(default_factory=lambda: [2, 4, 8, 16])
    micro_batches_per_stage: list[int] = field(default_factory=lambda: [1, 4, 16])
    unevenness: list[float] = field(default_factory=lambda: [0.0, 0.05, 0.2, 0.5])
    message: list[float] = field(default_factory=lambda: [0.01, 0.05, 0.2])
    pipelines: int = 400
    seed: int = 0
    out: str | None = None
    publish: bool = False
    """Write experiments/results, too."""

    def __post_init__(self) -> None:
        for key in ("pp", "micro_batches_per_stage"):
            for value in getattr(self, key):
                require_at_least(key, value, 1)
        for value in self.unevenness:
            require_at_least("unevenness", value, 0)
            require_at_most("unevenness", value, 1)
        for value in self.message:
            require_at_least("message", value, 0)
        require_at_least("pipelines", self.pipelines, 1)


def random_pipelines(
    count: int, pp: int, unevenness: float, message: float, rng: torch.Generator
) -> PassSeconds:
    """`count` pipelines whose stages take about 1 s forward and 2 s backward.

    Args:
        unevenness: Half the width of the uniform factors on them.
        message: Seconds of a message one way, over the 3 s of a mean stage.
        rng: Source of the factors.
    """

    def draw(mean: float) -> Tensor:
        return mean * (1 + unevenness * (2 * torch.rand(count, pp, generator=rng, dtype=torch.float64) - 1))

    forward, backward = draw(1.0), draw(2.0)
    messages = torch.full((count, pp - 1), 3.0 * message, dtype=torch.float64)
    return PassSeconds(forward, backward, backward / 2, messages)


def closed_form_error(passes: PassSeconds, num_micro_batches: int, *, blocking: bool) -> Tensor:
    """`closed form / simulated - 1` of each 1F1B pipeline, shape `(B,)`."""
    charged = passes.blocking()
    closed = pipeline_seconds(charged.forward + charged.backward, torch.tensor(num_micro_batches))
    pp = passes.forward.shape[1]
    ends = device_ends(charged if blocking else passes, "1f1b", pp, num_micro_batches)
    return closed / ends.amax(1) - 1.0


def run(options: ScheduleOptions) -> int:
    """Print both tables."""
    lines = ["Blocking messages, by unevenness:", "", *_uneven_table(options), "",
             "Unevenness 0.05, by the share of a stage's 3 s that a message one way takes:", "",
             *_message_table(options)]  # fmt: skip
    print("\n".join(lines))
    if options.out is not None:
        Path(options.out).write_text("\n".join(lines) + "\n", encoding="utf-8")
    if options.publish:
        publish("schedules", "How wrong is the pipeline's closed form?", "python -m experiments.schedules",
                "\n".join([METHOD, "", *lines]))  # fmt: skip
    return 0


def _uneven_table(options: ScheduleOptions) -> list[str]:
    rows = []
    for pp in options.pp:
        for ratio in options.micro_batches_per_stage:
            errors = [
                closed_form_error(_draw(options, pp, uneven, 0.0), ratio * pp, blocking=True)
                for uneven in options.unevenness
            ]
            rows.append(_row(pp, ratio * pp, errors))
    return markdown_table(
        ("pp", "micro-batches", *(f"unevenness {u:g}" for u in options.unevenness)), rows, ()
    )


def _message_table(options: ScheduleOptions) -> list[str]:
    rows = []
    names = [f"messages {x:g}, {kind}" for x in options.message for kind in ("blocking", "overlapped")]
    for pp in options.pp:
        for ratio in options.micro_batches_per_stage:
            errors = [
                closed_form_error(_draw(options, pp, 0.05, message), ratio * pp, blocking=blocking)
                for message in options.message
                for blocking in (True, False)
            ]
            rows.append(_row(pp, ratio * pp, errors))
    return markdown_table(("pp", "micro-batches", *names), rows, ())


def _draw(options: ScheduleOptions, pp: int, uneven: float, message: float) -> PassSeconds:
    rng = torch.Generator().manual_seed(options.seed)
    return random_pipelines(options.pipelines, pp, uneven, message, rng)


def _row(pp: int, count: int, errors: list[Tensor]) -> list[str]:
    spreads = (f"{_percent(e.median())} ({_percent(e.min())} to {_percent(e.max())})" for e in errors)
    return [str(pp), str(count), *spreads]


def _percent(value: Tensor) -> str:
    text = f"{100 * float(value):+.2f}"
    return "0" if text in ("+0.00", "-0.00") else text


if __name__ == "__main__":
    raise SystemExit(run_main("experiments.schedules", __doc__, ScheduleOptions, run))
