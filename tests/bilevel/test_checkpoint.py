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
from darts_parallel.bilevel.loop import BilevelSearch, resume
from tests.support.bilevel_tiny import BILEVEL, differences, killed_at, tiny_problem, tiny_search

STEPS = BILEVEL["num_steps"]


def without_clock(search: BilevelSearch) -> dict[str, Any]:
    return {key: value for key, value in search.state().items() if key != "seconds"}


def test_a_search_killed_at_five_random_moments_ends_as_one_that_was_not(tmp_path: Path) -> None:
    moments = sorted((torch.rand(5, generator=torch.Generator().manual_seed(0)) * STEPS).tolist())
    problem = tiny_problem()
    starts = [killed_at(problem, tmp_path, moment) for moment in moments]
    assert starts == sorted(starts)
    assert starts[-1] > starts[0] == 0
    resumed, whole = tiny_search(), tiny_search()
    assert resume(resumed, tmp_path, pytest.fail) >= starts[-1]
    resumed.run()
    whole.run()
    assert not differences(without_clock(resumed), without_clock(whole))


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
