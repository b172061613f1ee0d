"""Write `docs/reference/calibrated.md`: measured runs by GPU, precision and framework, with their errors.

`python docs/write_calibrated.py` prices every run with the shipped parameters; it takes about half a minute.
"""

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median

from experiments.calibration.calibrated import Calibrated
from experiments.calibration.report import RowOutcome, predict_runs
from experiments.data.runs import MeasuredRun, read_runs

PAGE = Path(__file__).parent / "reference" / "calibrated.md"
HEAD = """\
# What is calibrated

`python docs/write_calibrated.py` writes this page from
[the measured runs](../../experiments/data/README.md). Each row is a GPU in one precision with one
framework (a file of `conf/software`; `default` is none of them). A combination that is not listed
has no measured run: its figures come from other runs of the GPU and of the framework. The report says
*no runs* where the GPU or the framework has none at all. So look a pair up here.

The errors are medians over runs that the calibration has seen, so a new run is further off.
[How true the predictions are](../explanation/accuracy.md) has the errors of runs that it has not seen.

| GPU | precision | framework | runs with seconds | error of seconds | runs with memory | error of memory |
| --- | --- | --- | ---: | ---: | ---: | ---: |
"""


TAIL = """
## Kinds of runs

The calibration has seen these runs, too:

| kind | runs with seconds | error of seconds | runs with memory | error of memory |
| --- | ---: | ---: | ---: | ---: |
"""
RunTest = Callable[[MeasuredRun], bool]
KINDS: dict[str, RunTest] = {
    "cp above 1": lambda run: run.cp > 1,
    "sequences of 32,768 tokens or more": lambda run: run.seq_len >= 32768,
    "sequences of 131,072 tokens or more": lambda run: run.seq_len >= 131072,
    "adapters (LoRA)": lambda run: run.lora_rank > 0,
    "ZeRO-3": lambda run: run.zero_stage == 3,
    "pp above 1": lambda run: run.pp > 1,
    "1,024 GPUs or more": lambda run: run.gpus >= 1024,
}


def cells(outcomes: list[RowOutcome], part: str) -> str:
    """Return the number of runs and the median error of seconds or of memory."""
    ratios = [ratio for outcome in outcomes if (ratio := outcome.ratio(part))]
    if not ratios:
        return "0 | "
    errors = [abs(ratio - 1.0) for ratio in ratios]
    return f"{len(ratios)} | {100 * median(errors):.1f} %"


def page() -> str:
    """Return the text of the page."""
    groups: dict[tuple[str, str, str], list[RowOutcome]] = defaultdict(list)
    used = [one for one in predict_runs(read_runs(), Calibrated.read()) if not one.skipped]
    for outcome in used:
        run = outcome.run
        groups[" and ".join(run.devices), run.precision, run.framework].append(outcome)
    lines = []
    for (device, precision, software), outcomes in sorted(groups.items()):
        figures = f"{cells(outcomes, 'seconds')} | {cells(outcomes, 'memory')}"
        lines.append(f"| {device} | {precision} | {software} | {figures} |\n")
    kinds = []
    for name, belongs in KINDS.items():
        outcomes = [outcome for outcome in used if belongs(outcome.run)]
        kinds.append(f"| {name} | {cells(outcomes, 'seconds')} | {cells(outcomes, 'memory')} |\n")
    return HEAD + "".join(lines) + TAIL + "".join(kinds)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
