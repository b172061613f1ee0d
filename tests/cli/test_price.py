"""`darts-parallel price`: memory by term, and the distance to the best plan of the space."""

import json
import re
from math import log
from pathlib import Path
from typing import Any

import pytest

from darts_parallel.cost.evaluation import evaluate
from darts_parallel.plans.file import read_own_problem, read_plan
from darts_parallel.report import Outcome
from darts_parallel.report.explanation import SIGNS, memory_parts, memory_table
from tests.support.commands import QUIET, Command

JOB = (
    "model=toy",
    "training=toy",
    "cluster=toy",
    "search.num_steps=10",
    "search.num_restarts=2",
    *QUIET,
)


def data_of(path: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(path.read_text())
    return data


def test_a_priced_plan_stands_next_to_the_best_of_its_space(command: Command) -> None:
    done = command("price", *JOB, "pp=2", "tp=1", "micro_batch_size=1", "hydra.run.dir=own")
    assert done.status == 0, done.err
    own, best = (data_of(command.folder / "own" / name) for name in ("plan.json", "plan_best.json"))
    entry, seconds = own["best"], own["predicted"]["iteration_time_s"]
    assert entry["seconds"] == best["predicted"]["iteration_time_s"] < seconds
    assert entry["slower_by"] == pytest.approx(seconds / entry["seconds"] - 1.0)
    assert entry["chance"] <= 0.2
    assert f"({100 * entry['slower_by']:.1f} %) slower." in done.out
    near = log(1.0 + entry["slower_by"]) < log(1.0 + own["predicted"]["indistinguishable_below"])
    assert ("The priced plan is ≈ " in done.out) == near
    pins = "pp=2, mbs=1, tp=1"
    words = f"assumed: the fastest uniform plan with {pins}, whatever its risk"
    assert done.out.splitlines()[1] == words
    assert "█ state" in done.out
    again = command("price", "own/plan_best.json", *QUIET, "hydra.run.dir=again")
    assert "(0.0 %) slower." in again.out, again.err
    plain = command("plan=again/plan.json", *QUIET, "hydra.run.dir=plain")
    assert "Best plan of the space" not in plain.out
    assert "best" not in data_of(command.folder / "plain/plan.json")


def test_keys_that_contradict_a_plan_file_are_refused(command: Command) -> None:
    done = command("price", *JOB, "pp=2", "tp=1", "micro_batch_size=1", "hydra.run.dir=own")
    assert done.status == 0, done.err
    for key, wrong, right in (("tp", 2, 1), ("pp", 4, 2), ("micro_batch_size", 2, 1)):
        refused = command("price", "own/plan.json", f"{key}={wrong}", *QUIET)
        assert refused.status == 2
        sentence = f"space.{key}={wrong} must be {right} as in plan=own/plan.json; try leaving"
        assert sentence in refused.err
        assert command("price", "own/plan.json", f"{key}=[{right},{wrong}]", *QUIET).status == 0


def test_the_line_of_a_plan_that_does_not_fit_names_stage_and_bytes(command: Command) -> None:
    assert command(*JOB, "pp=2", "hydra.run.dir=own").status == 0
    used = max(data_of(command.folder / "own/plan.json")["predicted"]["memory_bytes"]) / 2**30
    smaller = f"cluster.devices.toy.memory_GiB={used / 2:.4f}"
    done = command("plan=own/plan.json", smaller, *QUIET, "hydra.run.dir=small")
    assert re.search(
        r"This plan does not fit: stage [01] needs [\d.]+ of [\d.]+ [GM]iB\.", done.out
    )
    page = (command.folder / "small/report.html").read_text()
    assert "start it" not in done.out + page
    assert "why this plan" in page


def test_a_plan_that_contradicts_its_own_file_breaks_a_rule_by_its_name(command: Command) -> None:
    assert command("price", *JOB, "pp=2", "mbs=1", "hydra.run.dir=own").status == 0
    path = command.folder / "own/plan.json"
    path.write_text(path.read_text().replace('"micro_batch_size": 1', '"micro_batch_size": 2'))
    done = command("plan=own/plan.json", *QUIET, "hydra.run.dir=again")
    assert "its micro-batch is not that of space.micro_batch_size=2 in its own file" in done.out


def test_unequal_stages_that_are_assumed_are_named(command: Command) -> None:
    done = command("price", *JOB, "model.num_layers=5", "pp=2", "hydra.run.dir=own")
    assert done.status == 0, done.err
    assert re.search(r"^assumed: (2, 3|3, 2) blocks in the stages; ", done.out, re.MULTILINE)
    chunks = command("price", *JOB, "model.num_layers=7", "pp=2", "vpp=4", "hydra.run.dir=chunks")
    assert re.search(r"^assumed: .*\b[2-7] × 1\b.* blocks in", chunks.out, re.MULTILINE), chunks.out
    even = command("price", *JOB, "model.num_layers=4", "pp=2", "hydra.run.dir=even")
    stages = data_of(command.folder / "even/plan.json")["stages"]
    assert ("blocks in the stages" in even.out) == (stages[0]["layers"] != [0, 3])


def test_a_faster_plan_than_the_best_says_what_it_risks(command: Command) -> None:
    """The priced plan has all the memory; the best one leaves room for the errors of the model."""
    assert command(*JOB, "space.zero_stage=0", "hydra.run.dir=own").status == 0
    used = max(data_of(command.folder / "own/plan.json")["predicted"]["memory_bytes"]) / 2**30
    tight = f"cluster.devices.toy.memory_GiB={1.02 * used:.5f}"
    done = command("price", "own/plan.json", tight, *QUIET, "hydra.run.dir=tight")
    assert re.search(r"faster, but it fits with \d+ %, less than the 80 % asked for\.", done.out)


def test_the_bars_of_memory_hold_every_byte(command: Command) -> None:
    assert command(*JOB, "hydra.run.dir=own").status == 0
    path = str(command.folder / "own/plan.json")
    problem = read_own_problem(path)
    plan = read_plan(path, problem.model)
    parts, cost = memory_parts(problem, plan), evaluate(plan, problem)
    assert [sum(own.values()) for own in parts] == pytest.approx(list(cost.memory_bytes))
    table = memory_table(Outcome(problem, plan, cost))
    bars = [str(cell) for cell in table.columns[-1].cells]
    for bar, own, capacity in zip(bars, parts, cost.capacity_bytes, strict=True):
        assert len(bar) == 40
        for part, sign in SIGNS.items():
            assert abs(bar.count(sign) - 40 * own[part] / capacity) <= 1.0


def test_of_many_bars_few_are_drawn(command: Command) -> None:
    """A pipeline of eight stages had as many bars, in 49 lines."""
    lines = command("price", *JOB, "model.num_layers=8", "pp=8").out.splitlines()
    (head,) = (number for number, line in enumerate(lines) if "█ state" in line)
    bars = [line.split()[0] for line in lines[head + 1 :] if re.search("[█▓▒░·]$", line)]
    assert bars[0] == "0"
    assert bars[-1] == "7"
    assert len(bars) <= 4
    assert lines[head].rstrip().endswith(f"{8 - len(bars)} more in report.html")
    assert len(lines) <= 40
    few = command("price", *JOB, "model.num_layers=4", "pp=4").out
    assert len(re.findall("^[0-3] .*[█▓▒░·]$", few, re.MULTILINE)) == 4


def test_a_plan_by_its_degrees_may_have_experts(command: Command) -> None:
    """Every short word is a degree of the given plan, ep and etp too."""
    job = ("model=toy_moe", *JOB[1:], "tp=1", "pp=2", "ep=4", "micro_batch_size=1")
    done = command("price", *job, "hydra.run.dir=own")
    assert done.status == 0, done.err
    assert data_of(command.folder / "own/plan.json")["parallelism"]["ep"] == 4


def test_another_batch_keeps_the_size_of_micro_batches(command: Command) -> None:
    """Twice the batch had micro-batches of twice the size, in the price and in the trainer's files."""
    job = (*JOB, "trainer=megatron", *QUIET)
    assert command(*job, "mbs=1", "hydra.run.dir=own").status == 0
    before = data_of(command.folder / "own/plan.json")
    batch = 2 * before["config"]["training"]["global_batch_size"]
    done = command("price", "own/plan.json", f"gbs={batch}", *QUIET, "hydra.run.dir=more")
    assert done.status == 0, done.err
    after = data_of(command.folder / "more/plan.json")
    assert after["num_micro_batches"] == 2 * before["num_micro_batches"]
    assert after["predicted"]["memory_bytes"] == before["predicted"]["memory_bytes"]
    command("plan=own/plan.json", f"gbs={batch}", "export=megatron", *QUIET, "hydra.run.dir=files")
    script = (command.folder / "files/megatron.sh").read_text()
    assert f"--micro-batch-size 1\n    --global-batch-size {batch}\n" in script


@pytest.mark.slow
def test_degrees_that_do_not_fit_are_shown_with_what_fills_the_memory(command: Command) -> None:
    """They were refused with the bytes alone, where a plan's file is shown with its tables."""
    small = "cluster.devices.toy.memory_GiB=0.05"
    degrees = ("pp=1", "tp=1", "mbs=1", "zero=0", "recompute=none")
    done = command("price", *JOB, small, *degrees, "hydra.run.dir=own")
    assert done.status == 0, done.err
    lines = done.out.splitlines()
    pins = "pp=1, mbs=1, tp=1, zero=0, recompute=none"
    assert lines[1] == f"assumed: the lightest uniform plan with {pins}, whatever its risk"
    assert "fits in no uniform plan" in done.out
    assert "This plan does not fit: stage 0 needs" in done.out
    assert "no plan with these settings fits; this one needs least memory" in lines
    assert "no plan of the space fits, so there is none to compare with." in done.out
    (bar,) = (line.split()[-1] for line in lines if re.search("^0 .*[█▓▒░]$", line))
    assert len(bar) == 40
    assert data_of(command.folder / "own/plan.json")["predicted"]["out_of_memory_probability"] > 0.9
    swept = ("-m", "price", *JOB, small, "pp=1", "tp=1,2", *QUIET, "hydra.sweep.dir=swept")
    several = command(*swept)
    assert several.out.count(": does not fit") == several.status == 2
