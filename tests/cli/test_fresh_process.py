import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import Command

SHORT = ("model=toy", "cluster=toy", "training=toy", "search=gradient", "search.num_steps=30",
         "search.num_restarts=2", "search.polish_starts=2")  # fmt: skip


def without_seconds(plan: Any) -> Any:
    """`plan.json` without what may differ between equal searches."""
    if isinstance(plan, dict):
        return {
            key: without_seconds(value) for key, value in plan.items() if key not in ("seconds", "output")
        }
    return [without_seconds(value) for value in plan] if isinstance(plan, list) else plan


@pytest.mark.slow
def test_a_fresh_process_with_curves_takes_all_steps_verifies_and_finds_the_same_plan(
    tmp_path: Path, command: Command
) -> None:
    """matplotlib's and TensorBoard's first imports take longer than all steps of the search."""
    arguments = [*SHORT, "search.max_seconds=5", f"hydra.run.dir={tmp_path / 'fresh'}"]
    fresh = subprocess.run(
        [sys.executable, "-m", "darts_parallel", *arguments], capture_output=True, text=True, check=True
    )
    assert "Verification" in fresh.stdout
    assert "30 steps" in fresh.stdout
    found = json.loads((tmp_path / "fresh" / "plan.json").read_text())
    assert (found["search"]["steps"], found["search"]["stopped_by"]) == (30, None)
    quiet = f"hydra.run.dir={tmp_path / 'quiet'}"
    assert command(*SHORT, "search.max_seconds=5", quiet, "output.tensorboard=false").status == 0
    again = json.loads((tmp_path / "quiet" / "plan.json").read_text())
    assert without_seconds(found) == without_seconds(again)
