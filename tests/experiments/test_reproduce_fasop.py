import json
import sys
from pathlib import Path

import pytest

from darts_parallel.problem.layer_profiles import FORWARD_FILE
from experiments import reproduce_fasop
from tests.support.fasop_tiny import write_profile

PLAN_KEYS = {"tp", "dp", "pp", "micro_batch_size", "layers_per_stage", "nodes"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A made-up profile of BERT's 26 layers."""
    write_profile(tmp_path, "BERT-345M", 24, seed=0)
    return tmp_path


def _run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["reproduce_fasop", *arguments])
    return reproduce_fasop.main()


def test_both_plans_of_a_case_stand_beside_each_other_in_the_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = folder / "out"
    assert _run(monkeypatch, f"profiles={folder}", "model=BERT", "cluster=Hetero-small", f"out={out}") == 0
    (case,) = json.loads((out / "fasop.json").read_text())
    assert case["case"] == "BERT, Hetero-small"
    for key in ("fasop", "ours"):
        entry = case[key]
        assert PLAN_KEYS | {"s_per_step"} <= set(entry)
        assert set(entry["plan"]) == PLAN_KEYS
        assert all(entry["plan"][name] == entry[name] for name in PLAN_KEYS)
        assert sorted(entry["nodes"]) == ["A10", "A10", "A10", "A100"]
        assert entry["tp"] * entry["dp"] * entry["pp"] == 16
        assert sum(entry["layers_per_stage"]) == 26
    assert 0 < case["ours"]["s_per_step"] <= case["fasop"]["s_per_step"]
    printed = capsys.readouterr().out
    assert "BERT, Hetero-small" in printed
    assert "0.8197" in printed  # the published figure beside the one of the made-up profile


def test_the_front_holds_what_nothing_dominates() -> None:
    points = [(1.0, 5.0), (2.0, 2.0), (3.0, 2.0), (2.0, 2.0), (4.0, 1.0)]
    assert reproduce_fasop.on_front(points) == [True, True, False, True, True]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "profiles= must be a folder with measured layer times; try profiles=FOLDER."),
        (["profiles={folder}/none"], "must be a folder that holds layer_forward_seconds.csv"),
        (["profiles={folder}", "study=paretto"], "try pareto."),
        (["profiles={folder}", "study=pareto", "model=BERT"], "model=BERT needs study=cases"),
        (["profiles={folder}", "model=BART"], "must be part of a case's name"),
        (["profiles={folder}", "model=T5"], "model=T5-1.3B must be measured; try BERT-345M."),
    ],
)
def test_a_wish_that_cannot_be_met_is_one_sentence_and_leaves_nothing(
    folder: Path,
    arguments: list[str],
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = [argument.format(folder=folder) for argument in arguments]
    assert _run(monkeypatch, *given, f"out={folder / 'out'}") == 2
    captured = capsys.readouterr()
    assert sentence in captured.err
    assert captured.err.count("\n") == 1
    assert not (folder / "out").exists()


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("A10 (y)", "T4 (y)", "gpu of model BERT-345M=A10 must be measured"),
        (
            "A10 (y),4,",
            "A10 (y),8,",
            "tp=4 of model BERT-345M on A10 (y) must be measured; try 2.",
        ),
        ("forward_s\n", "forward_s\nbroken\n", "line 2: the row must have 7 fields"),
    ],
)
def test_a_profile_that_lacks_something_is_one_sentence(
    folder: Path,
    old: str,
    new: str,
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = folder / FORWARD_FILE
    path.write_text(path.read_text().replace(old, new))
    assert _run(monkeypatch, f"profiles={folder}", "model=BERT", f"out={folder / 'out'}") == 2
    captured = capsys.readouterr()
    assert sentence in captured.err
    assert captured.err.count("\n") == 1
    assert not (folder / "out").exists()
