"""Does the simulator give the seconds of recorded steps from their computation alone?

    python -m experiments.replay_traces data=FOLDER
    python -m experiments.replay_traces data=FOLDER out=outputs/mine

Reads every trace of the folder (`trace-NAME.csv[.gz]`, one line an operation: `step, dp_rank, stage, optype,
mb_id, seq_id, start_ts, duration`), replays each step from the recorded seconds of its forward and backward
passes through the longest path of the schedule, and adds the collectives of the step's end without their
waiting. Sends and receives are not read. A step is measured from the beginning of its first forward pass to
the end of its last operation. Leaves replay.csv (`trace, step, measured_s, predicted_s`) and replay.md in
`out`.
"""

from dataclasses import dataclass

import numpy as np

from darts_parallel.config.options import run_main
from darts_parallel.errors import ConfigError
from darts_parallel.plan.file import write_text
from darts_parallel.report.tables import csv_text, markdown_table
from experiments.results_page import publish, result_folder
from experiments.traces.recorded import read_steps, trace_files
from experiments.traces.replay import predicted_seconds

COLUMNS = ("trace", "step", "measured_s", "predicted_s")


@dataclass
class ReplayOptions:
    """What to replay."""

    data: str = ""
    """Folder of traces."""
    out: str = "outputs/replay"
    publish: bool = False
    """Write experiments/results/replay_traces.md, too."""


@dataclass(frozen=True)
class Replayed:
    """One step, recorded and replayed; seconds."""

    trace: str
    step: int
    measured_s: float
    predicted_s: float

    @property
    def error(self) -> float:
        """Predicted over measured seconds, minus 1."""
        return self.predicted_s / self.measured_s - 1.0


def replay(options: ReplayOptions) -> int:
    """Replay all steps, print and write the errors; returns the exit status."""
    if not options.data:
        raise ConfigError("data is missing; write data=FOLDER, a folder that holds trace-NAME.csv.gz.")
    steps = [
        Replayed(step.trace, step.step, step.measured_s, predicted_seconds(step))
        for path in trace_files(options.data)
        for step in read_steps(path)
    ]
    out = result_folder(options.out)
    rows = [(s.trace, s.step, f"{s.measured_s:.6f}", f"{s.predicted_s:.6f}") for s in steps]
    write_text(out / "replay.csv", csv_text(COLUMNS, rows))
    text = error_table(steps)
    write_text(out / "replay.md", text)
    print(text + f"\n{out}/replay.csv, replay.md")
    if options.publish:
        question = "Does the simulator give the seconds of recorded steps from their computation alone?"
        publish("replay_traces", question, "python -m experiments.replay_traces data=FOLDER", text)
    return 0


def error_table(steps: list[Replayed]) -> str:
    """Errors by trace and overall, as Markdown."""
    names = list(dict.fromkeys(step.trace for step in steps))
    header = (
        "trace",
        "steps",
        "measured, s",
        "predicted, s",
        "median error",
        "90 % below",
        "largest",
        "bias",
    )
    lines = []
    for name in [*names, *(["all"] if len(names) > 1 else [])]:
        own = [step for step in steps if name in (step.trace, "all")]
        errors = np.array([step.error for step in own])
        size = np.abs(errors)
        means = [np.mean([s.measured_s for s in own]), np.mean([s.predicted_s for s in own])]
        shares = (np.median(size), np.quantile(size, 0.9), size.max())
        cells = [name, str(len(own)), *(f"{mean:.3f}" for mean in means)]
        cells += [*(f"{100 * share:.2f} %" for share in shares), f"{100 * np.median(errors):+.2f} %"]
        lines.append(cells)
    return "\n".join(markdown_table(header, lines)) + "\n"


if __name__ == "__main__":
    raise SystemExit(run_main("experiments.replay_traces", __doc__, ReplayOptions, replay))
