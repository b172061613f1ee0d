import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from darts_parallel.bilevel import checkpoint
from darts_parallel.bilevel.checkpoint import (
    CheckpointError,
    checkpoints,
    load_checkpoint,
    load_latest,
    save_checkpoint,
)
from darts_parallel.bilevel.loop import BilevelRecord, resume
from tests.bilevel_tiny import same, tiny_search

ROOT = Path(__file__).parent.parent
SCRIPT = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from tests.bilevel_tiny import tiny_search
from darts_parallel.bilevel.loop import resume
folder = Path(sys.argv[1])
search = tiny_search()
print("at", resume(search, folder, print), flush=True)
search.run(lambda record: print("step", record.step, flush=True), folder, checkpoint_every=1)
"""


def finished_state() -> Any:
    search = tiny_search()
    plan = search.run()
    return plan, search.state()


class KilledError(Exception):
    pass


def test_a_search_killed_at_ten_random_moments_ends_as_one_that_was_not(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    plan, expected = finished_state()
    kills = sorted(int(step) for step in torch.randint(1, 16, (10,), generator=generator))
    for kill in kills:
        search = tiny_search()
        resume(search, tmp_path, pytest.fail)

        def stop(record: BilevelRecord, kill: int = kill) -> None:
            if record.step == kill:
                raise KilledError

        # with some kills the resumed search is past the moment already; it then stops before its next step
        if search.trainer.step < kill:
            with pytest.raises(KilledError):
                search.run(stop, tmp_path, checkpoint_every=3)
    search = tiny_search()
    assert resume(search, tmp_path, pytest.fail) > 0
    assert search.run(folder=tmp_path, checkpoint_every=3) == plan
    assert same(search.state(), expected)


@pytest.mark.slow
def test_a_process_that_is_killed_and_started_again_ends_as_one_that_was_not(tmp_path: Path) -> None:
    arguments = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for last in (5, 11):
        with subprocess.Popen(arguments, env=environment, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line == f"step {last}\n":
                    time.sleep(0.003)  # somewhere in the writing of a checkpoint, or after it
                    process.send_signal(signal.SIGKILL)
                    break
        assert process.returncode == -signal.SIGKILL
    subprocess.run(arguments, env=environment, check=True, capture_output=True)
    plan, expected = finished_state()
    search = tiny_search()
    assert resume(search, tmp_path, pytest.fail) == 16
    assert search.plan() == plan
    assert same(search.state(), expected)


def test_the_last_two_are_kept_and_the_newest_is_read(tmp_path: Path) -> None:
    for step in (1, 2, 10):
        save_checkpoint(tmp_path, step, {"step": step, "tensor": torch.arange(3)})
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000002.ckpt", "step-00000010.ckpt"]
    state = load_latest(tmp_path, pytest.fail)
    assert state is not None
    assert state["step"] == 10


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "foreign"])
def test_a_damaged_checkpoint_is_refused_and_the_one_before_it_is_used(tmp_path: Path, damage: str) -> None:
    save_checkpoint(tmp_path, 1, {"step": 1})
    path = save_checkpoint(tmp_path, 2, {"step": 2})
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    damaged = {
        "cut": path.read_bytes()[:-20],
        "flip": bytes(content),
        "empty": b"",
        "foreign": b"hello\nworld",
    }
    path.write_bytes(damaged[damage])
    with pytest.raises(CheckpointError, match=r"step-00000002\.ckpt is refused"):
        load_checkpoint(path)
    sentences: list[str] = []
    assert load_latest(tmp_path, sentences.append) == {"step": 1}
    assert len(sentences) == 1
    assert "The one before it is used." in sentences[0]


def test_a_folder_without_checkpoints_starts_at_the_beginning(tmp_path: Path) -> None:
    assert resume(tiny_search(), tmp_path / "none", pytest.fail) == 0


def test_a_failure_while_writing_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path, 1, {"step": 1})

    def fail(handle: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(checkpoint.os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        save_checkpoint(tmp_path, 2, {"step": 2})
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001.ckpt"]


def test_a_checkpoint_of_other_settings_is_refused_with_a_sentence(tmp_path: Path) -> None:
    search = tiny_search()
    search.step()
    save_checkpoint(tmp_path, 1, search.state())
    with pytest.raises(
        CheckpointError, match=r"learning_rate=0\.0015 was searched, but this run has learning_rate=0\.1"
    ):
        resume(tiny_search(learning_rate=0.1), tmp_path, pytest.fail)
    assert resume(tiny_search(retrain_steps=5), tmp_path, pytest.fail) == 1
