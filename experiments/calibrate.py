"""Fit the hardware parameters of the cost model to measured runs, by gradient through the cost.

    python -m experiments.calibrate                     files in outputs/calibration
    python -m experiments.calibrate data=FOLDER         with the runs of a folder, too
    python -m experiments.calibrate cross_validate=[house]   left-out houses alone, faster
    python -m experiments.calibrate shipped=true        overwrite the shipped files

Minimizes the logarithmic error (Huber) of the shipped runs plus priors (data sheets and micro-benchmarks);
prints the error in sample and, the honest figure, held out: fitted without a whole house (publisher and
stack), model or source and tried on it, and how many of those runs the 80 % intervals hold. A folder holds
CSV files as experiments.validate_cost_model reads them. Leaves calibrated.yaml (parameters, their posterior
and the spreads), device/*.yaml, cluster/*.yaml and software/*.yaml (for --config-dir) and
cross_validation.csv in `out`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from darts_parallel.config import config_dir, one_of, ranged, run_main
from darts_parallel.errors import Amounts, ConfigError
from darts_parallel.planner import DENSE, EXPERTS
from darts_parallel.plans import write_text
from darts_parallel.report import csv_text, markdown_table
from experiments.calibration.calibrated import SHIPPED, Calibrated, Parameters, Place, write_fit
from experiments.calibration.errors import ErrorSummary, summarise
from experiments.calibration.fit import PARTS, Residuals, fit, posterior
from experiments.calibration.folds import (
    KINDS,
    HeldOut,
    cross_validate,
    fold_errors,
    misfits,
    spreads,
)
from experiments.calibration.preset_files import write_presets
from experiments.calibration.problems import MeasuredCase, read_cases
from experiments.calibration.report import ERRORS, FIGURES, held_out_lines
from experiments.data.normalize import read_folder
from experiments.data.runs import read_runs


@dataclass
class CalibrationOptions:
    """Command line of `python -m experiments.calibrate`."""

    data: str = ""
    """Folder of CSV files of measured runs that are fitted with the shipped ones."""
    out: str = "outputs/calibration"
    start: str = ""
    """A calibrated.yaml to begin at, which saves steps; the prior's mean without it."""
    steps: int = ranged(60)
    """Most steps of the dense runs, and then of the mixtures."""
    cross_validate: list[str] = one_of(list(KINDS), tuple(KINDS))
    """Leave out whole houses, models, sources."""
    shipped: bool = False
    """Overwrite conf/device, conf/cluster, conf/software and the parameters of validate_cost_model."""


def calibrate(options: CalibrationOptions) -> int:
    """Fit, cross-validate, write; returns the exit status."""
    Path(options.out).mkdir(parents=True, exist_ok=True)  # before the minutes, not after them
    cases = usable_cases(options)
    parameters = Parameters([Place.of_run(case.run) for case in cases])
    print(f"{len(cases)} runs, {len(parameters)} latent parameters")
    start = Calibrated.read(Path(options.start)).latent(parameters) if options.start else None
    latent, found = fit(cases, parameters, start, options.steps)
    ratios = found.error.exp()
    summaries = {}
    for index, part in enumerate(PARTS):
        summaries["in sample", part] = summarise(ratios[found.part == index].tolist())
    held_out: dict[str, list[HeldOut]] = {}
    for kind in options.cross_validate:
        held_out[kind] = cross_validate(cases, parameters, latent, found, kind)
        for part in PARTS:
            errors = fold_errors([h for h in held_out[kind] if h.part == part])
            summaries |= {(f"held out by {kind}", part): errors["all"]} if errors else {}
    for kind in held_out:
        print("\n".join(held_out_lines(kind, held_out)))
    rows = [(*name, *error.cells()) for name, error in summaries.items() if error.count]
    print("\n".join(markdown_table(("", "figure", "runs", *ERRORS), rows, (0, 1))))
    spread = spreads(held_out)
    if timed := spread.get(PARTS[0]):
        spread["misfits"] = misfits_by_kind(cases, found, timed)
    fitted = (parameters, latent, posterior(found, parameters), provenance(cases, summaries))
    write_files(options, lambda path: write_fit(path, *fitted, spread), held_out)
    return 0


def misfits_by_kind(
    cases: list[MeasuredCase], found: Residuals, spread: Mapping[str, Any]
) -> dict[str, Amounts]:
    """Find the spreads of the GPUs whose seconds a fit misses, of dense models and of mixtures."""
    result = {}
    for kind, own in ((DENSE, spread), (EXPERTS, spread[EXPERTS])):
        runs = found.where((found.part == 0) & (found.mixture == (kind == EXPERTS)))
        places = [Place.of_run(cases[i].run).device for i in runs.case.tolist()]
        result[kind] = misfits(places, runs.error, own["own"])
    return result


def usable_cases(options: CalibrationOptions) -> list[MeasuredCase]:
    """Build the runs that the cost model can express.

    Errors:
        ConfigError: there is none.
    """
    runs = read_runs() + (read_folder(options.data)[0] if options.data else [])
    cases = [case for case in read_cases(runs) if isinstance(case, MeasuredCase)]
    if not cases:
        raise ConfigError(
            f"data={options.data} must hold a run that the cost model can express, as python -m "
            "experiments.validate_cost_model tells; try a folder with one."
        )
    return cases


def provenance(
    cases: list[MeasuredCase], summaries: dict[tuple[str, str], ErrorSummary]
) -> list[str]:
    """Write what stands above the figures of a fit: runs, sources, errors of the seconds."""
    files = ", ".join(sorted({case.run.file.removesuffix(".csv") for case in cases}))
    lines = [
        f"Fitted by python -m experiments.calibrate, {date.today()}, to {len(cases)} runs of",
        f"{files}.",
    ]
    return lines + [
        f"Error of the seconds {name}: {100 * e.median:.1f} % median, {100 * e.mean:.1f} % mean."
        for (name, part), e in summaries.items()
        if part == PARTS[0] and e.count
    ]


def write_files(
    options: CalibrationOptions,
    write: Callable[[Path], None],
    held_out: dict[str, list[HeldOut]],
) -> None:
    """Write parameters, device, cluster and framework files and the held-out predictions.

    Args:
        write: Writes the parameters into a file.
    """
    when = f"(python -m experiments.calibrate, {date.today()})"
    out = Path(options.out)
    for folder in (out, config_dir()) if options.shipped else (out,):
        write(folder / SHIPPED.name)
        write_presets(
            folder, Calibrated.read(folder / SHIPPED.name), when
        )  # of the digits that are kept
    header = ("fold_kind", "fold", "file", "row", "figure", "measured", "predicted")
    rows = []
    for kind, predictions in held_out.items():
        for held in predictions:
            run = held.case.run
            _, unit = FIGURES.get(held.part, ("", 1.0))
            figures = [f"{unit * value:.6g}" for value in (held.measured, held.predicted)]
            rows.append((kind, held.fold, run.file, run.row, held.part, *figures))
    write_text(out / "cross_validation.csv", csv_text(header, rows))


if __name__ == "__main__":
    raise SystemExit(run_main("experiments.calibrate", calibrate))
