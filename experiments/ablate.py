"""Ablate the gradient search: one change at a time, and rivals at equal wall-clock.

    python -m experiments.ablate                             every variant, 3 problems, 10 seeds
    python -m experiments.ablate quick=true                  a first try: toy, few steps
    python -m experiments.ablate variants=[default,gumbel] problems=[gpt2_tight] seeds=3
    python -m experiments.ablate launcher=submitit_slurm hydra.launcher.partition=cpu

A Hydra multirun over problem x variant x seed, by the launcher of the same name: `joblib` and `basic` here,
`submitit_slurm` on a Slurm cluster, `ray` on a Ray cluster (extras `sweep`, `slurm`, `ray`). Arguments that
begin with `hydra` go to Hydra. Leaves ablate.csv, summary.md and ablate.png in `out`.
"""

import json
import os
import re
import shutil
import sys
from dataclasses import dataclass, field
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from darts_parallel.config import (
    MAX_PROCESSES,
    require_at_least,
    require_member,
    require_members,
    require_within,
    run_main,
)
from darts_parallel.errors import ConfigError
from darts_parallel.plan import write_json
from experiments.comparison.ablate_report import write_report
from experiments.comparison.variants import (
    ALONE,
    BILEVEL,
    BILEVEL_VARIANTS,
    GRADIENT_VARIANTS,
    PROBLEMS,
    RIVALS,
    run_variant,
)
from experiments.results_page import processor

VARIANTS = (*GRADIENT_VARIANTS, *RIVALS, *BILEVEL_VARIANTS)
LAUNCHERS = {
    "basic": None, "joblib": "sweep", "submitit_slurm": "slurm", "submitit_local": "slurm", "ray": "ray",
}  # fmt: skip
"""Hydra launchers, and the extra of this project that installs each."""
PLUGINS = {
    "joblib": "hydra_joblib_launcher",
    "ray": "hydra_ray_launcher",
    "submitit_slurm": "hydra_submitit_launcher",
    "submitit_local": "hydra_submitit_launcher",
}


@dataclass
class AblateJob:
    """Describe one run of the sweep, as Hydra composes it."""

    problem: str = "toy_tight"
    variant: str = "default"
    seed: int = 0
    budget: float = 4.0
    quick: bool = False


@dataclass
class AblateOptions:
    """Choose what to sweep over, and where."""

    problems: list[str] = field(default_factory=lambda: list(ALONE))
    variants: list[str] = field(default_factory=lambda: list(VARIANTS))
    seeds: int = 10
    """Seeds 0 to `seeds` - 1."""
    budget: float = 4.0
    """Seconds of a rival; its plan is read off its curve at the search's own seconds."""
    quick: bool = False
    """One easy problem, two seeds, few steps: whether it works, nothing else."""
    launcher: str = ""
    """Hydra launcher; empty: joblib where it is installed, else basic."""
    jobs: int = 2
    """Runs at the same time (joblib), each on one thread."""
    out: str = "outputs/ablate"
    publish: bool = False
    """Write experiments/results, too."""

    def __post_init__(self) -> None:
        require_at_least("seeds", self.seeds, 1)
        require_within("jobs", self.jobs, 1, MAX_PROCESSES)
        require_at_least("budget", self.budget, 0, strict=True)
        require_members("problems", self.problems, tuple(PROBLEMS))
        require_members("variants", self.variants, VARIANTS)
        if self.launcher:
            require_member("launcher", self.launcher, tuple(LAUNCHERS))
        if self.quick:
            self.problems, self.seeds = ["toy_tight"], min(self.seeds, 2)


def ablate(options: AblateOptions, hydra_arguments: list[str], console: Console) -> int:
    """Sweep, then write what came out."""
    folder = Path(options.out)
    shutil.rmtree(folder / "runs", ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    for problems, variants in _sweeps(options):
        sweep = [f"problem={','.join(problems)}", f"variant={','.join(variants)}"]
        _multirun(options, [*sweep, *hydra_arguments], folder / "runs" / f"{problems[0]}_{variants[0]}")
    rows = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("runs/*/*/row.json"))]
    command = f"python -m experiments.ablate {' '.join([*sys.argv[1:], *hydra_arguments])}".rstrip()
    write_report(rows, folder, _note(options), console, command if options.publish else None)
    return 0


def _sweeps(options: AblateOptions) -> list[tuple[list[str], list[str]]]:
    """Cross problems and variants: bilevel variants have a problem of their own."""
    plain = [variant for variant in options.variants if variant not in BILEVEL_VARIANTS]
    bilevel = [variant for variant in options.variants if variant in BILEVEL_VARIANTS]
    return [pair for pair in ((options.problems, plain), ([BILEVEL], bilevel)) if pair[1]]


def _multirun(options: AblateOptions, arguments: list[str], folder: Path) -> None:
    """Run one Hydra multirun whose jobs leave a `row.json` each."""
    launcher = options.launcher or ("joblib" if _has_plugin("joblib") else "basic")
    if launcher in PLUGINS and not _has_plugin(launcher):
        raise ConfigError(
            f"launcher={launcher} needs a Hydra plugin that is not installed; try basic, or "
            f"pip install 'darts-parallel[{LAUNCHERS[launcher]}]'."
        )
    given = [
        f"seed={','.join(str(seed) for seed in range(options.seeds))}",
        f"budget={options.budget}",
        f"quick={str(options.quick).lower()}",
        f"hydra.sweep.dir={_quoted(str(folder))}",
        "hydra.sweep.subdir=${problem}_${variant}_${seed}",
        "hydra.output_subdir=null",
        "hydra/job_logging=none",
        f"hydra/launcher={launcher}",
    ]
    if launcher == "joblib":
        given.append(f"hydra.launcher.n_jobs={options.jobs}")
    os.environ["HYDRA_FULL_ERROR"] = "1"
    ConfigStore.instance().store(name="ablate_job", node=AblateJob)
    before, sys.argv[1:] = sys.argv[1:], ["--multirun", *given, *arguments]
    try:
        hydra.main(version_base="1.3", config_path=None, config_name="ablate_job")(run_job)()
    finally:
        sys.argv[1:] = before


def _quoted(text: str) -> str:
    """Quote a text as the value of an override, whatever signs but an interpolation it holds."""
    escaped = re.sub(r"(\\*)(?='|$)", r"\1\1", text).replace("'", r"\'")
    return f"'{escaped}'"


def _has_plugin(launcher: str) -> bool:
    try:
        return find_spec(f"hydra_plugins.{PLUGINS[launcher]}") is not None
    except ModuleNotFoundError:
        return False


def run_job(composed: DictConfig) -> float:
    """Run one job of the sweep; return the seconds per iteration, which Hydra's sweepers minimise."""
    values: Any = OmegaConf.to_container(composed)
    job, folder = AblateJob(**values), Path(HydraConfig.get().runtime.output_dir)
    row = run_variant(job.problem, job.variant, job.seed, job.budget, job.quick, folder)
    write_json(folder / "row.json", {key: _plain(value) for key, value in row.items()})
    return float(row.get("polished_s", row.get("time_to_target_ratio", 0.0)))


def _plain(value: Any) -> Any:
    """Replace infinite numbers, which JSON does not know, by null."""
    return None if isinstance(value, float) and not isfinite(value) else value


def _note(options: AblateOptions) -> str:
    settings = "quick, a trial only" if options.quick else f"{options.seeds} seeds"
    return f"{settings}; {options.jobs} at a time, one thread each, on {processor()}."


def main() -> int:
    """Run the command; return the exit status."""
    passed = [argument for argument in sys.argv[1:] if argument.startswith(("hydra.", "hydra/", "+hydra"))]
    sys.argv[1:] = [argument for argument in sys.argv[1:] if argument not in passed]
    console = Console(width=140)
    return run_main("experiments.ablate", __doc__, AblateOptions, lambda o: ablate(o, passed, console))


if __name__ == "__main__":
    raise SystemExit(main())
