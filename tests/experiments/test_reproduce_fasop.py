"""FASOP's plans: its printed figures from shipped layer times, its costs by hand, its recurrence."""

import ast
import csv
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from darts_parallel.errors import InfeasibleError
from darts_parallel.problem.measured_times import FORWARD_FILE, read_profiles
from experiments import reproduce_fasop
from experiments.reproduce_fasop import (
    SHIPPED,
    TICK,
    FasopCase,
    FasopJob,
    FasopNode,
    Strategies,
    read_cases,
    read_facts,
    solve,
    stage_ends,
)

TYPES = (
    FasopNode("A100", "A100-40GB", 40e9, 1800e9, 40 * 2.0**30),
    FasopNode("A10", "A10", 40e9, 128e9, 24 * 2.0**30, shares_bus=True),
)
SMALL = FasopJob(
    "tiny",
    hidden_size=64,
    seq_len=32,
    vocab_size=100,
    num_heads=4,
    global_batch_size=8,
    num_blocks=4,
)


@pytest.fixture
def case(tmp_path: Path) -> FasopCase:
    """Two nodes of two GPUs, and 6 layers of 1 ms on the fast and 2 ms on the slow one."""
    kinds = ["embedding", *["transformer"] * 4, "post_process"]
    lines = ["source,model,gpu,tp,layer_index,layer_kind,forward_s"]
    for node, seconds in zip(TYPES, (0.001, 0.002), strict=True):
        for tp in (1, 2):
            lines += [
                f"S,tiny,{node.device},{tp},{i},{kind},{seconds}" for i, kind in enumerate(kinds)
            ]
    (tmp_path / FORWARD_FILE).write_text("\n".join(lines) + "\n")
    return FasopCase("tiny", SMALL, TYPES, (1, 1), 2, read_profiles(tmp_path))


def test_plans_that_its_program_prints_come_out_of_shipped_times() -> None:
    cases = read_cases(str(SHIPPED))
    published = {name: plan["seconds"] for name, plan in read_facts()["published"].items()}
    assert (len(cases), len(published)) == (12, 5)
    layers = {"BERT, Homo-small": (26,), "BERT, Hetero-small": (14, 5, 5, 2)}
    for name, expected in layers.items():
        theirs, ours, _ = solve(cases[name])
        assert theirs.layers_per_stage == expected
        assert theirs.s_per_step == pytest.approx(published[name], rel=1e-4)
        assert ours.s_per_step <= theirs.s_per_step
        assert sorted(ours.nodes) == sorted(theirs.nodes)


def test_the_command_leaves_two(
    case: FasopCase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reproduce_fasop, "read_cases", lambda _: {"tiny": case})
    facts = {"published": {"tiny": {"seconds": 0.1234}}, "program_cpu_s": {}}
    monkeypatch.setattr(reproduce_fasop, "read_facts", lambda: facts)
    monkeypatch.setattr(sys, "argv", ["reproduce_fasop", f"out={tmp_path}"])
    assert reproduce_fasop.run(reproduce_fasop.FasopOptions(out=str(tmp_path))) == 0
    with (tmp_path / "reproduce_fasop.csv").open() as file:
        theirs, ours, blind = csv.DictReader(file)
    assert blind["planner"] == reproduce_fasop.NOT_SHARED
    assert (theirs["planner"], ours["planner"]) == ("fasop", "ours")
    for plan in (theirs, ours):
        assert sum(ast.literal_eval(plan["layers_per_stage"])) == 6
        assert int(plan["tp"]) * int(plan["dp"]) * int(plan["pp"]) == 4
        assert sorted(ast.literal_eval(plan["nodes"])) == ["A10", "A100"]
    assert float(ours["s_per_step"]) <= float(theirs["s_per_step"])
    assert "0.1234" in (tmp_path / "reproduce_fasop.md").read_text()


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("A10 (AWS g5)", "T4 (y)", "gpu of model BERT-345M=A10 must be one of"),
        ("BERT-345M,A10 (AWS g5),4,", "BERT-345M,A10 (AWS g5),8,", "must be measured; try 2."),
        ("collectives\n", "collectives\nbroken\n", "line 2: the row must have 8 fields"),
        ("25,post_process", "25,post_process,", "must have 8 fields"),
    ],
)
def test_layer_times_that_lack_something_are_refused_in_a_sentence(
    old: str,
    new: str,
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = (SHIPPED / FORWARD_FILE).read_text()
    assert old in text
    (tmp_path / FORWARD_FILE).write_text(text.replace(old, new))
    monkeypatch.setattr(
        sys, "argv", ["reproduce_fasop", f"profiles={tmp_path}", f"out={tmp_path / 'out'}"]
    )
    name = "experiments.reproduce_fasop"
    assert reproduce_fasop.run_main(name, reproduce_fasop.run) == 2
    captured = capsys.readouterr()
    assert sentence in captured.err
    assert captured.err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_cluster_that_nothing_fits_and_a_chain_of_other_layers_are_refused(
    case: FasopCase,
) -> None:
    with pytest.raises(InfeasibleError, match="no plan fits"):
        solve(replace(case, types=tuple(replace(node, memory=1.0) for node in TYPES)))
    with pytest.raises(Exception, match=r"has 6 layers at tp=1, which must be 7; try 7\."):
        solve(replace(case, job=replace(SMALL, num_blocks=5)))


def test_two_stages_with_sends_end_as_worked_out_by_hand() -> None:
    # forward 1 s, backward 2 s; 0.5 s forward, 0.25 s back, two micro-batches:
    # stage 0: F 0-1, sent 1.5, F -2.5, sent 3; B 4.75-6.75; B 8-10
    # stage 1: F 1.5-2.5, B -4.5, sent 4.75; F -5.75, B -7.75, sent 8
    ends = stage_ends(np.array([[3.0], [3.0]]), np.array([0.5]), np.array([0.25]), 2)
    assert ends[:, 0].tolist() == [10.0, 7.75]


def test_equal_stages_without_sends_take_the_closed_form_of_1f1b() -> None:
    ends = stage_ends(np.full((4, 1), 3.0), np.zeros(1), np.zeros(1), 8)
    assert ends[0, 0] == pytest.approx((8 + 4 - 1) * 3.0)


def test_a_small_strategy_costs_what_a_hand_calculation_says(case: FasopCase) -> None:
    # 6 layers of 3 ms (A100) and 6 ms (A10) for forward and backward, micro-batches of 2: twice that
    strategies = Strategies(case, (2, 1, 2, 2), np.array([[0, 1]]), case.ticks(1, 2))
    counts = np.array([[4, 2]])
    assert strategies.num_micro_batches == 2
    assert strategies.ticks[1, 2] * TICK == pytest.approx(0.024)
    p2p = 2 * 32 * 64 * 16 / (40e9 / 2 / 1.05)
    np.testing.assert_allclose(strategies.p2p, [[p2p]])
    # stage 0 has the embedding and three blocks; its two ranks share a node of two GPUs
    parameters = 64 * 100 + 3 * (12 * 64**2 + 20800)
    sync = parameters * 16 / 1800e9 + 64 * 100 * 16 / (40e9 / 2)
    np.testing.assert_allclose(strategies.sync_seconds(counts), [[sync, sync]])
    # 24 ms in both stages: 8 ms forward, 16 ms backward; every send waits for nobody
    end = 0.008 + p2p + 0.024 + p2p + 0.024 + p2p + 0.016
    assert strategies.plans(counts)[0].s_per_step == pytest.approx(end + sync)


def test_memory_is_what_a_hand_calculation_says(case: FasopCase) -> None:
    strategies = Strategies(case, (2, 2, 1, 2), np.array([[0, 1]]), case.ticks(2, 2))
    block = 12 * 64**2 / 2 * 18 + 32 * 2 * 2 * 64 * (10 + 24 / 2 + 5 * 4 * 32 / (64 * 2))
    embedding = 64 * 100 / 2 * 18 + 32 * 2 * 64 * 2 * 2 / 2
    post = 64 * 100 / 2 * 18 + 4 * 32 * 2 * (64 + 100) / 2
    expected = [[1.10 * (embedding + 2 * block), 1.10 * (2 * block + post)]]
    np.testing.assert_allclose(strategies.memory_bytes(np.array([[3, 3]])), expected)
