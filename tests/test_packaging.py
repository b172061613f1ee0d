"""The wheel: what is in it, and that its command runs from any folder. No network."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TOY = (
    "model=toy",
    "cluster=toy",
    "training=toy",
    "search.num_steps=5",
    "search.num_restarts=2",
    "output.tensorboard=false",
    "hydra.run.dir=run",
)

pytestmark = pytest.mark.slow


def run(arguments: list[str], folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run(
        arguments, cwd=folder, env={**clean, **environment}, capture_output=True, text=True, timeout=120
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    built = run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)], ROOT)
    assert built.returncode == 0, built.stderr
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with nothing but the unpacked wheel, as `pip install --no-deps --target` leaves it."""
    folder = tmp_path_factory.mktemp("site")
    pip = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--disable-pip-version-check"]
    done = run([sys.executable, *pip, "--target", str(folder), str(wheel)], folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_wheel_holds_the_configuration_the_licence_and_no_tests(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for path in (ROOT / "conf").rglob("*.yaml"):
        assert f"darts_parallel/{path.relative_to(ROOT)}" in names
    for package in ("darts_parallel", "baselines"):
        for path in (ROOT / package).rglob("*.py"):
            assert str(path.relative_to(ROOT)) in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    tops = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert tops == {"darts_parallel", "baselines"}


def test_the_module_of_the_wheel_runs_from_any_folder(installed: Path, tmp_path: Path) -> None:
    done = run([sys.executable, "-c", AS_MODULE, *TOY], tmp_path, PYTHONPATH=str(installed))
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.splitlines()[0] == str(installed / "darts_parallel" / "conf")
    assert json.loads((tmp_path / "run/plan.json").read_text())["model"]["name"] == "toy"


AS_MODULE = """
import runpy
from darts_parallel.config.schema import config_dir
print(config_dir(), flush=True)
runpy.run_module("darts_parallel", run_name="__main__", alter_sys=True)
"""
"""What `python -m` does, after a line that says where the configuration lies."""


def test_the_command_of_the_wheel_reads_its_configuration_from_any_folder(
    installed: Path, tmp_path: Path
) -> None:
    script = installed / "bin" / "darts-parallel"
    refused = run([sys.executable, str(script), "model=tooy"], tmp_path, PYTHONPATH=str(installed))
    assert refused.returncode == 2
    assert refused.stderr.startswith("darts-parallel: model=tooy must name a file of the group model")
    assert "nearest legal: toy." in refused.stderr
