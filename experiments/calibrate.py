"""Fit the hardware parameters of the cost model to measured runs, by gradient through the cost.

    python -m experiments.calibrate data=FOLDER                     files in outputs/calibration
    python -m experiments.calibrate data=FOLDER cross_validate=[]   without the held-out error, faster
    python -m experiments.calibrate data=FOLDER shipped=true        overwrite the shipped files

Reads the CSV files that experiments.validate_cost_model reads. Minimises the logarithmic error (Huber)
plus priors (data sheets and micro-benchmarks) by Levenberg-Marquardt; prints the error in sample and, the
honest figure, held out: fitted without a whole model, source or software family and tried on it, and how many
of those runs the 80 % intervals hold. Leaves calibrated.yaml (parameters, their posterior and the spreads),
device/*.yaml, cluster/*.yaml and software/*.yaml (for --config-dir), cross_validation.csv in `out`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from rich.table import Table

from darts_parallel.config.checks import require_at_least, require_members
from darts_parallel.config.options import run_main
from darts_parallel.config.schema import config_dir
from darts_parallel.errors import ConfigError
from darts_parallel.plan.file import write_text
from darts_parallel.report.tables import csv_text, filled_table
from darts_parallel.report.uncertainty import EXPERTS
from experiments.calibration.calibrated import SHIPPED, Calibrated
from experiments.calibration.coverage import by_place, cross_coverage, pair_spread, spread
from experiments.calibration.crossvalidation import KINDS, HeldOut, by_fold, cross_validate, held_out_errors
from experiments.calibration.errors import ErrorSummary, summarise
from experiments.calibration.fit import PARTS, Residuals, fit, posterior
from experiments.calibration.outcome import read_cases
from experiments.calibration.parameters import FAMILY, Parameters
from experiments.calibration.predict import place_of
from experiments.calibration.preset_files import (
    MARK,
    cluster_names,
    device_names,
    write_cluster,
    write_device,
    write_software,
)
from experiments.calibration.problems import Case
from experiments.calibration.rows import read_folder
from experiments.calibration.stacks import DEFAULT, STACKS
from experiments.results_page import console_of


@dataclass
class CalibrationOptions:
    """What to fit."""

    data: str = ""
    """Folder of CSV files of measured runs."""
    out: str = "outputs/calibration"
    start: str = ""
    """A calibrated.yaml to begin at, which saves steps; the prior's mean without it."""
    steps: int = 15
    """Most steps of Levenberg-Marquardt."""
    cross_validate: list[str] = field(default_factory=lambda: list(KINDS))
    """Leave out whole models, sources, software families; none: in-sample errors only, no intervals."""
    refinements: int = 0
    """Further steps of every fold's own fit, each with a Jacobian of its own."""
    shipped: bool = False
    """Overwrite conf/device and the parameters of validate_cost_model."""

    def __post_init__(self) -> None:
        require_at_least("steps", self.steps, 1)
        require_at_least("refinements", self.refinements, 0)
        require_members("cross_validate", self.cross_validate, KINDS)


def calibrate(options: CalibrationOptions) -> int:
    """Fit, cross-validate, write; returns the exit status."""
    console = console_of(120, highlight=False)
    cases = usable_cases(options.data)
    parameters = Parameters([place_of(case) for case in cases])
    console.print(f"{len(cases)} runs, {len(parameters)} latent parameters")
    start = Calibrated.read(Path(options.start)).latent(parameters) if options.start else None
    latent, found = fit(
        cases, parameters, start, most_steps=options.steps,
        progress=lambda index, value: console.print(f"step {index}: objective {value:.1f}"),
    )  # fmt: skip
    summaries = {"in sample": in_sample(found)}
    held_out: dict[str, list[HeldOut]] = {}
    for kind in options.cross_validate:
        held_out[kind] = cross_validate(
            cases, parameters, latent, found, kind, refinements=options.refinements,
            progress=lambda fold: console.print(f"without {fold}", markup=False),
        )  # fmt: skip
        summaries[f"held out by {kind}"] = {
            part: held_out_errors(held_out[kind], part)["all"] for part in PARTS
        }
    for kind, results in held_out.items():
        console.print(fold_table(kind, results))
    console.print(summary_table(summaries))
    for part in PARTS:
        for kind, results in held_out.items():
            held = [h for h in (r.held(part) for r in results) if h is not None]
            if held:
                console.print(
                    f"80 % intervals of {part}, held out by {kind}: {100 * cross_coverage(held):.0f} % inside"
                )
    fitted = Calibrated.of_fit(parameters, latent, posterior(found, latent, parameters))
    write_files(options, cases, fitted, summaries, held_out)
    return 0


def usable_cases(data: str) -> list[Case]:
    """The runs of a folder that the cost model can express.

    Errors:
        ConfigError: there is none.
    """
    cases = [case for _, case in read_cases(read_folder(data).rows) if isinstance(case, Case)]
    if not cases:
        raise ConfigError(
            f"data={data} must hold a run that the cost model can express; "
            "nearest legal: see the reasons by python -m experiments.validate_cost_model."
        )
    return cases


def in_sample(found: Residuals) -> dict[str, ErrorSummary]:
    """Errors of the runs that were fitted."""
    result = {}
    for index, part in enumerate(PARTS):
        error = found.error[found.part == index].exp()
        result[part] = summarise(error.tolist(), [1.0] * len(error))
    return result


def summary_table(summaries: dict[str, dict[str, ErrorSummary]]) -> Table:
    """Errors in sample and held out, percent."""
    rows = [
        (name, part, *e.cells()) for name, parts in summaries.items() for part, e in parts.items() if e.count
    ]
    header = ("", "figure", "runs", "median", "mean", "bias", "90 % below")
    return filled_table("Error, %", header, rows, (0, 1))


def fold_table(kind: str, results: Sequence[HeldOut]) -> Table:
    """Held-out errors of every fold, percent."""
    title = f"Held out by {kind}: error of the seconds and of the memory, %"
    rows = []
    seconds, memory = (held_out_errors(results, part) for part in PARTS)
    for fold in sorted({*seconds, *memory}, key=by_fold):
        cells = []
        for part in (seconds, memory):
            cells += part[fold].cells() if fold in part else [""] * 5
        rows.append((fold, *cells))
    return filled_table(title, (kind, *("runs", "median", "mean", "bias", "90 %") * 2), rows)


def write_files(
    options: CalibrationOptions,
    cases: Sequence[Case],
    fitted: Calibrated,
    summaries: dict[str, dict[str, ErrorSummary]],
    held_out: dict[str, list[HeldOut]],
) -> None:
    """Write parameters, device, cluster and software files and the held-out predictions."""
    out = Path(options.out)
    spread = spreads(held_out)
    files = ", ".join(sorted({case.run.row.file.removesuffix(".csv") for case in cases}))
    note = [
        f"Fitted by python -m experiments.calibrate, {date.today()}, to {len(cases)} runs of",
        f"{files}.",
    ]
    note += [
        f"Error of the seconds {name}: {100 * e.median:.1f} % median, {100 * e.mean:.1f} % mean."
        for name, e in ((name, parts["seconds"]) for name, parts in summaries.items())
        if e.count
    ]
    write_hardware(out, fitted)
    fitted.write(out / "calibrated.yaml", note, spread)
    write_text(out / "cross_validation.csv", held_out_csv(held_out))
    if options.shipped:
        write_hardware(Path(config_dir()), fitted)
        fitted.write(SHIPPED, note, spread)


def spreads(held_out: dict[str, list[HeldOut]]) -> dict[str, dict[str, Any]]:
    """Residual spreads by figure: of a software without runs, of a source without, of known places.

    Each is a standard deviation of log(predicted / measured) beside that of the parameters; `pair` that of
    the difference of two plans of one measured job. Mixtures have spreads of their own (`experts`).
    """
    dense, mixtures = (
        {kind: [r for r in results if r.case.problem.model.has_experts == own]
         for kind, results in held_out.items()}
        for own in (False, True)
    )  # fmt: skip
    result = _spreads(dense)
    for part, own in _spreads(mixtures).items():
        result.setdefault(part, {})[EXPERTS] = own
    return result


def _spreads(held_out: dict[str, list[HeldOut]]) -> dict[str, dict[str, Any]]:
    result: dict[str, dict[str, Any]] = {}
    for part in PARTS:
        held = {
            kind: [h for h in (r.held(part) for r in results) if h is not None]
            for kind, results in held_out.items()
        }
        if not any(held.values()):
            continue
        wide = {kind: round(spread(members), 4) for kind, members in held.items() if members}
        known = next((held[kind] for kind in ("model", "source", "family") if held.get(kind)), [])
        result[part] = {**wide, "places": {k: round(v, 4) for k, v in by_place(known, spread(known)).items()}}
    jobs = next((held_out[kind] for kind in ("source", "family", "model") if held_out.get(kind)), [])
    if jobs and PARTS[0] in result:
        result[PARTS[0]]["pair"] = round(pair_spread(jobs), 4)
    return result


def write_hardware(folder: Path, fitted: Calibrated) -> None:
    """Write the device and cluster files that the search reads into `folder`."""
    for kind in ("device", "cluster", "software"):
        (folder / kind).mkdir(parents=True, exist_ok=True)
    when = f"(python -m experiments.calibrate, {date.today()})"
    for name in device_names():
        known = FAMILY.get(name, name) in fitted.names("device")
        runs = "fitted to runs on this GPU" if known else "no runs on this GPU; from those on others"
        write_device(folder / "device", name, fitted, [f"{MARK[2:]} efficiencies {when}:", f"{runs}."])
    for name in cluster_names():
        note = f"{MARK[2:]} links {when}: efficiencies and latencies of what lists an efficiency."
        write_cluster(folder / "cluster", name, fitted, [note])
    for stack in (*STACKS, DEFAULT):
        if stack is not DEFAULT and stack.name in fitted.names("stack"):
            write_software(folder / "software", stack, fitted, f"{MARK[2:]} figures {when}.")


def held_out_csv(held_out: dict[str, list[HeldOut]]) -> str:
    """Every held-out prediction, one line a run and kind of fold."""
    header = ("fold_kind", "fold", "file", "row", "measured_iteration_s", "predicted_iteration_s",
              "measured_memory_gb", "predicted_memory_gb")  # fmt: skip
    rows = []
    for kind, results in held_out.items():
        for r in results:
            run = r.case.run
            memory = "" if run.memory_bytes is None else f"{run.memory_bytes / 2**30:.6g}"
            seconds = "" if run.iteration_s is None else f"{run.iteration_s:.6g}"
            rows.append((kind, r.fold, run.row.file, run.row.line, seconds, f"{r.seconds:.6g}",
                         memory, f"{r.memory_bytes / 2**30:.6g}"))  # fmt: skip
    return csv_text(header, rows)


if __name__ == "__main__":
    raise SystemExit(run_main("experiments.calibrate", __doc__, CalibrationOptions, calibrate))
