"""The wheel: what is in it, and that a fresh process of it runs from any folder. No network."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import Command

ROOT = Path(__file__).resolve().parent.parent
TOY = (
    "model=toy",
    "cluster=toy",
    "training=toy",
    "search=gradient",
    "search.num_steps=30",
    "search.num_restarts=2",
)

pytestmark = pytest.mark.slow


def run(arguments: list[str], folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run(
        arguments,
        cwd=folder,
        env={**clean, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    built = run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)], ROOT
    )
    assert built.returncode == 0, built.stderr
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with nothing but the unpacked wheel, as `pip install --no-deps --target` leaves it."""
    folder = tmp_path_factory.mktemp("site")
    pip = [
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--disable-pip-version-check",
    ]
    done = run([sys.executable, *pip, "--target", str(folder), str(wheel)], folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_wheel_holds_the_configuration_the_licence_and_no_tests(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for path in (ROOT / "conf").rglob("*.*"):
        assert f"darts_parallel/{path.relative_to(ROOT)}" in names
    for path in [*(ROOT / "darts_parallel").rglob("*.py"), *ROOT.glob("darts_parallel/*/*.yaml")]:
        assert str(path.relative_to(ROOT)) in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    tops = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert tops == {"darts_parallel"}


def test_extras_can_be_installed_together() -> None:
    """The optuna sweeper of Hydra wants an optuna below 3, so that no extra may name a later one."""
    text = (ROOT / "pyproject.toml").read_text()
    extras = text.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    assert "hydra-optuna-sweeper" in extras
    assert '"optuna' not in extras


def test_wheel_in_a_fresh_process_refuses_in_one_sentence_then_finds_the_plan_of_a_warm_one(
    installed: Path, tmp_path: Path, command: Command
) -> None:
    """matplotlib's and TensorBoard's first imports, with curves, take longer than all steps of the search."""
    arguments = [*TOY, "search.max_seconds=5", "hydra.run.dir=fresh"]
    fresh = run([sys.executable, "-c", WHEEL, *arguments], tmp_path, PYTHONPATH=str(installed))
    assert fresh.returncode == 0, fresh.stderr
    assert fresh.stdout.splitlines()[0] == str(installed / "darts_parallel" / "conf")
    assert fresh.stderr.startswith("darts-parallel: model=tooy must name a file of the group model")
    assert "try toy, or model=hf" in fresh.stderr
    assert fresh.stderr.count("\n") == 1
    assert "dynamic programming" in fresh.stdout
    found = json.loads((tmp_path / "fresh" / "plan.json").read_text())
    assert (found["search"]["steps"], found["search"]["stopped_by"]) == (30, None)
    quiet = ["output.tensorboard=false", "hydra.run.dir=quiet"]
    assert command(*TOY, "search.max_seconds=5", *quiet).status == 0
    again = json.loads((tmp_path / "quiet" / "plan.json").read_text())
    assert without_seconds(found) == without_seconds(again)


WHEEL = """
import runpy, sys
from pathlib import Path
import darts_parallel
from darts_parallel.config.schema import config_dir
print(config_dir(), flush=True)
job, sys.argv = sys.argv, ["darts-parallel", "model=tooy"]
try:
    script = Path(darts_parallel.__file__).parent.parent / "bin/darts-parallel"
    runpy.run_path(str(script), run_name="__main__")
except SystemExit as refused:
    assert refused.code == 2
sys.argv = job
runpy.run_module("darts_parallel", run_name="__main__", alter_sys=True)
"""
"""The installed command and what `python -m` does, after a line that says where the configuration lies.

Both in one process, since to import torch takes seconds."""


def without_seconds(plan: Any) -> Any:
    """`plan.json` without what may differ between equal searches."""
    if isinstance(plan, dict):
        return {
            key: without_seconds(value)
            for key, value in plan.items()
            if key not in ("seconds", "output")
        }
    return [without_seconds(value) for value in plan] if isinstance(plan, list) else plan
