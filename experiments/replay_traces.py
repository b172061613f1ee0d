"""Does the simulator give the seconds of recorded steps from their computation alone?

    python -m experiments.replay_traces                    the shipped steps of two production jobs
    python -m experiments.replay_traces data=FOLDER        trace-NAME.csv or trace-NAME.csv.gz of a folder

Replays each step of a trace (one line an operation: `step, dp_rank, stage, optype, mb_id, start_ts,
duration`, seconds) from the recorded seconds of its passes alone: when each may begin follows from
the longest path of the schedule. Sends and receives, which hold the waiting, are not read; of the
collectives of the step's end the shortest recorded duration among the ranks counts, since the rank
that comes last waits for nobody. A step is measured from the beginning of its first forward pass to
the end of its last operation. Leaves replay.csv (`trace, step, measured_s, predicted_s`) in `out`.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from darts_parallel.config import run_main
from darts_parallel.cost import Array, Graph, compiled, pass_ends
from darts_parallel.errors import ConfigError
from darts_parallel.problem import read_rows
from darts_parallel.report import markdown_table
from darts_parallel.schedules import Operation, find
from experiments.data import DATA
from experiments.study import Study, StudyOptions, report_text, run_study

SHIPPED = DATA / "traces"
COLUMNS = ("step", "dp_rank", "stage", "optype", "mb_id", "start_ts", "duration")
FORWARD = "forward-compute"
BACKWARD = "backward-compute"
LAYERNORM = "layernorm-grads-all-reduce"
EMBEDDING = "embedding-grads-all-reduce"
SCATTER = "grads-reduce-scatter"
CLIP = "optimizer-clip-main-grad"
OPTIMIZER = "optimizer"
INCOMPLETE = (
    "one forward and one backward pass of every rank, stage and micro-batch",
    "a whole step",
)
"""Rule that a step of missing or repeated passes breaks, and what to try."""
KNOWN = ("1f1b", "gpipe")
"""Schedules that a recorded order is compared with."""


@dataclass
class ReplayOptions(StudyOptions):
    """Command line of `python -m experiments.replay_traces`."""

    jobs: int = 1
    data: str = str(SHIPPED)
    """Folder of traces."""


class RecordedOperation(NamedTuple):
    """One recorded operation; seconds from an origin that all operations of a step share."""

    dp_rank: int
    stage: int
    micro_batch: int
    start: float
    duration: float


@dataclass(frozen=True)
class RecordedStep:
    """All operations of one step of one job."""

    trace: str
    step: int
    entries: dict[str, list[RecordedOperation]] = field(repr=False)
    """Operations by kind, in the order in which they began."""

    @property
    def measured_s(self) -> float:
        """Return seconds from the beginning of the first forward pass to the end of the last operation."""
        begin = min(entry.start for entry in self.entries[FORWARD])
        ends = (
            entry.start + entry.duration for entries in self.entries.values() for entry in entries
        )
        return max(ends) - begin

    def refused(self, rule: str, instead: str) -> ConfigError:
        """Return the error of a step that breaks a rule."""
        return ConfigError(f"trace {self.trace}: step {self.step} must hold {rule}; try {instead}.")


@dataclass(frozen=True)
class ReplayedStep:
    """One step, recorded and replayed; seconds."""

    trace: str
    step: int
    measured_s: float
    predicted_s: float


def read_steps(path: Path) -> Iterator[RecordedStep]:
    """Yield the steps of a trace in the order of their numbers.

    Errors:
        ConfigError: a column is missing, a cell holds no number, or a step has no forward pass.
    """
    name = path.name.removeprefix("trace-").split(".csv")[0]
    steps: dict[int, dict[str, list[RecordedOperation]]] = defaultdict(lambda: defaultdict(list))
    for place, row in read_rows(path, COLUMNS):
        try:
            rank, stage, batch = (int(row[key]) for key in ("dp_rank", "stage", "mb_id"))
            entry = RecordedOperation(
                rank, stage, batch, float(row["start_ts"]), float(row["duration"])
            )
            steps[int(row["step"])][row["optype"]].append(entry)
        except ValueError:
            rule = "must hold a number in every column but optype"
            raise ConfigError(f"{place}: the row {rule}; try 0.") from None
    for number, kinds in sorted(steps.items()):
        ordered = {kind: sorted(own, key=lambda entry: entry.start) for kind, own in kinds.items()}
        step = RecordedStep(name, number, ordered)
        if FORWARD not in kinds or BACKWARD not in kinds:
            raise step.refused(f"{FORWARD} and {BACKWARD}", "a whole step")
        yield step


def predicted_seconds(step: RecordedStep) -> float:
    """Return seconds from the beginning of the first forward pass to the end of the optimizer.

    Errors:
        ConfigError: the recorded passes are no whole step of a known schedule.
    """
    forward, backward = (_by_place(step, kind) for kind in (FORWARD, BACKWARD))
    if forward.shape != backward.shape:
        raise step.refused(*INCOMPLETE)
    pp, count = forward.shape[1:]
    graph = compiled(_schedule(step, pp, count), pp, count, 1)
    return _after_passes(step, pipeline_ends(graph, forward, backward))


def pipeline_ends(graph: Graph, forward: Array, backward: Array) -> Array:
    """Return seconds until every device has ended its last pass, shape `(dp, pp)`.

    Args:
        graph: A schedule of one stage a device.
        forward: Seconds of every pass, `(dp, pp, m)`.
        backward: The same for the whole backward passes.
    """
    kind, stage, batch = graph.operations.T
    duration = np.stack([forward, backward])[kind, :, stage, batch]
    ends, _ = pass_ends(graph, duration, np.zeros_like(duration))
    return ends[graph.last].T


def _by_place(step: RecordedStep, kind: str) -> Array:
    """Return seconds of the passes of a kind, `(dp, pp, m)`."""
    entries = step.entries[kind]
    last = np.max([entry[:3] for entry in entries], axis=0)
    seconds = np.full(last + 1, np.nan)
    for entry in entries:
        if min(entry[:3]) < 0 or not np.isnan(seconds[entry[:3]]):
            raise step.refused(*INCOMPLETE)
        seconds[entry[:3]] = entry.duration
    if np.isnan(seconds).any():
        raise step.refused(*INCOMPLETE)
    return seconds


def _schedule(step: RecordedStep, pp: int, count: int) -> str:
    """Find the schedule whose order of passes every rank followed."""
    recorded = defaultdict[tuple[int, int], list[Operation]](list)
    passes = [("F", entry) for entry in step.entries[FORWARD]]
    passes += [("B", entry) for entry in step.entries[BACKWARD]]
    for letter, entry in sorted(passes, key=lambda p: p[1].start):
        own = recorded[entry.dp_rank, entry.stage]
        own.append(Operation(letter, entry.stage, entry.micro_batch))
    for schedule in KNOWN:
        orders = find(schedule).orders(pp, count)
        if all(tuple(own) == orders[stage] for (_, stage), own in recorded.items()):
            return schedule
    raise step.refused(f"passes in the order of {' or '.join(KNOWN)}", KNOWN[0])


def _after_passes(step: RecordedStep, ends: Array) -> float:
    """Return seconds until the optimizer has ended everywhere.

    Tied embeddings are summed by the first and the last stage of a rank, gradients by all ranks of a
    stage, and the norm of the gradients by all devices.

    Args:
        ends: Seconds until the passes have ended, `(dp, pp)`.
    """

    def shortest(kind: str, **place: int) -> float:
        """Return the seconds of a collective without waiting; 0 where it was not recorded."""
        own = step.entries.get(kind, ())
        chosen = (e for e in own if all(getattr(e, key) == value for key, value in place.items()))
        return min((entry.duration for entry in chosen), default=0.0)

    ranks, stages = ends.shape
    time = ends + shortest(LAYERNORM)
    if EMBEDDING in step.entries:
        outer = [0, stages - 1]
        for rank in range(ranks):
            time[rank, outer] = time[rank, outer].max() + shortest(EMBEDDING, dp_rank=rank)
    for stage in range(stages):
        time[:, stage] = time[:, stage].max() + shortest(SCATTER, stage=stage)
    last = max((entry.duration for entry in step.entries.get(OPTIMIZER, ())), default=0.0)
    return float(time.max()) + shortest(CLIP) + last


SHARES = (0.5, 0.9, 1.0)
"""Quantiles of the errors in the table."""


def replay(path: Path) -> list[ReplayedStep]:
    """Replay all steps of a trace."""
    return [
        ReplayedStep(step.trace, step.step, step.measured_s, predicted_seconds(step))
        for step in read_steps(path)
    ]


def report(steps: Sequence[ReplayedStep]) -> str:
    """Return errors by trace and overall."""
    names = list(dict.fromkeys(step.trace for step in steps))
    header = (
        "trace",
        "steps",
        "measured, s",
        "predicted, s",
        "median error, %",
        "90 % below",
        "largest",
        "bias",
    )
    lines = []
    for name in [*names, *(["all"] if len(names) > 1 else [])]:
        measured, predicted = np.array(
            [(s.measured_s, s.predicted_s) for s in steps if name in (s.trace, "all")]
        ).T
        errors = 100 * (predicted / measured - 1)
        size = np.abs(errors)
        means = [f"{seconds.mean():.3f}" for seconds in (measured, predicted)]
        spread = [f"{value:.2f}" for value in np.quantile(size, SHARES)]
        median = f"{np.median(errors):+.2f}"
        lines.append((name, str(len(size)), *means, *spread, median))
    verdict = f"The median error of {lines[-1][1]} steps is {lines[-1][4]} %."
    return report_text(markdown_table(header, lines), verdict)


def run(options: ReplayOptions) -> int:
    """Replay every trace of the folder; returns the exit status.

    Errors:
        ConfigError: there is none.
    """
    files = sorted(path for path in Path(options.data).glob("trace-*") if ".csv" in path.suffixes)
    if not files:
        raise ConfigError(
            f"data={options.data} must be a folder that holds trace-NAME.csv or trace-NAME.csv.gz; "
            f"try {SHIPPED}."
        )
    study = Study(
        "replay_traces",
        "Does the simulator give the seconds of recorded steps from their computation alone?",
        "predictions of the computation itself; other schedules than 1F1B and GPipe.",
        replay,
        report,
        page="replay",
    )
    return run_study(study, {path.name: path for path in files}, options)


if __name__ == "__main__":
    raise SystemExit(run_main("experiments.replay_traces", run))
