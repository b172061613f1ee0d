"""Batch sizes that change during a training, in the files of trainers."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from darts_parallel.cost.evaluation import evaluate
from darts_parallel.errors import PlanError
from darts_parallel.export import export_plan
from darts_parallel.plans.file import read_phases
from darts_parallel.plans.phases import BatchPhase, megatron_schedule
from darts_parallel.plans.strategy import LayerStrategy
from darts_parallel.problem.problem import Problem, load_problem
from darts_parallel.report import Outcome, plan_dict
from tests.export.test_megatron import flags_of
from tests.support.commands import QUIET, Command
from tests.support.export_plans import LLAMA, plan_of

STEPS = [(0, 8), (10, 16), (15, 32), (20, 16)]
"""First step and global batch size of every phase."""
SAMPLES = [(0, 8), (80, 16), (160, 32), (320, 16)]
"""Sequences before every phase, counted by hand, and its global batch size."""


@pytest.fixture(scope="module")
def llama() -> Problem:
    return load_problem(LLAMA)


def phases_of_sizes(problem: Problem, micro: int = 2, dp: int = 4) -> list[BatchPhase]:
    plan = plan_of(problem, LayerStrategy(8 // dp, dp), 1)
    return [
        BatchPhase(step, batch, replace(plan, num_micro_batches=batch // (micro * dp)))
        for step, batch in STEPS
    ]


class MegatronSteps:
    """The rule of StepBatchsizeNumMicroBatchesCalculator (core_v0.18.0), as far as it counts batches."""

    def __init__(self, schedule: str, tokens: int, micro: int, dp: int) -> None:
        entries = [entry.split(":") for entry in schedule.split()]
        self.schedule = [(int(float(start)) // tokens, int(batch)) for start, batch in entries]
        self.smallest = micro * dp
        assert self.schedule[0][0] == 0
        assert all(first[0] < second[0] for first, second in pairwise(self.schedule))

    def batch(self, consumed: int) -> int:
        """The batch after so many sequences, which micro-batches of all replicas must divide."""
        found = next(batch for start, batch in reversed(self.schedule) if consumed >= start)
        assert found % self.smallest == 0, "current global batch size is not divisible"
        return found


@pytest.mark.parametrize(("micro", "dp"), [(1, 8), (2, 4), (4, 2)])
def test_megatron_changes_the_batch_at_the_steps_of_the_phases(
    llama: Problem, micro: int, dp: int
) -> None:
    phases = phases_of_sizes(llama, micro, dp)
    exported = export_plan(llama, phases[-1].plan, "megatron", phases=phases)
    flags = flags_of(exported.files["megatron.sh"])
    assert "global-batch-size" not in flags  # Megatron-LM refuses both
    assert flags["micro-batch-size"] == str(micro)
    assert flags["seq-length"] == str(llama.training.seq_len)
    schedule = flags["step-batch-size-schedule"] or ""
    calculator = MegatronSteps(schedule, llama.training.seq_len, micro, dp)
    consumed = 0
    for step in range(30):
        batch = calculator.batch(consumed)
        assert batch == next(own for first, own in reversed(STEPS) if step >= first)
        consumed += batch
    assert any("--train-samples" in note for note in exported.notes)
    assert not any("a run of its own" in note for note in exported.notes)


def test_a_batch_that_micro_batches_do_not_divide_breaks_megatrons_rule(llama: Problem) -> None:
    schedule = megatron_schedule(phases_of_sizes(llama), 16) or ""
    with pytest.raises(AssertionError, match="not divisible"):
        MegatronSteps(schedule, 16, 8, 4).batch(0)


def other_plans(phases: list[BatchPhase]) -> list[BatchPhase]:
    """Return the same batches, one of them with micro-batches twice as large."""
    count = phases[1].plan.num_micro_batches
    changed = replace(phases[1].plan, num_micro_batches=2 * count)
    return [phases[0], replace(phases[1], plan=changed), *phases[2:]]


@pytest.mark.parametrize("target", ["megatron", "torchtitan"])
def test_files_that_do_not_follow_the_phases_are_for_the_last_one_and_say_so(
    llama: Problem, target: str
) -> None:
    phases = phases_of_sizes(llama)
    if target == "megatron":
        phases = other_plans(phases)
        assert megatron_schedule(phases, 16) is None
    exported = export_plan(llama, phases[-1].plan, target, phases=phases)
    assert not any("step-batch-size-schedule" in text for text in exported.files.values())
    assert any("from step 20 on at a global batch size of 16" in note for note in exported.notes)
    two = export_plan(llama, phases[1].plan, target, phases=phases[:2])
    assert any("from step 10 on at a global batch size of 16" in note for note in two.notes)
    one = export_plan(llama, phases[-1].plan, target, phases=phases[-1:])
    assert not any("phases" in note for note in one.notes)


def test_the_command_exports_the_phases_of_a_plan_file(
    tmp_path: Path, llama: Problem, command: Command
) -> None:
    phases = phases_of_sizes(llama)
    entries = [
        {
            "from_step": phase.from_step,
            "global_batch_size": phase.global_batch_size,
            "plan": entry_of_plan(llama, phase),
        }
        for phase in phases
    ]
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(entries[-1]["plan"] | {"training_phases": entries}))
    tokens = llama.training.seq_len
    schedule = " ".join(f"{samples * tokens}:{batch}" for samples, batch in SAMPLES)
    done = command(f"plan={file}", "export=megatron", "hydra.run.dir=run", *QUIET)
    assert done.status == 0, done.err
    assert "give --train-samples" in done.out
    script = command.folder / "run" / "megatron.sh"
    assert f'    --step-batch-size-schedule "{schedule}"\n' in script.read_text()
    file.write_text(json.dumps(entries[-1]["plan"] | {"training_phases": entries[1:]}))
    late = command(f"plan={file}", "export=megatron", "hydra.run.dir=late", *QUIET)
    assert late.status == 2
    assert "from_step=[10, 15, 20] must rise from 0; try [0, 1, 2]" in late.err


def test_one_batch_has_no_schedule(llama: Problem) -> None:
    phases = phases_of_sizes(llama)
    assert megatron_schedule(phases[:1], 16) is None
    assert megatron_schedule([], 16) is None


BROKEN: list[tuple[Any, str]] = [
    (3, "training_phases=3 must be a list"),
    ([3], "a int must be a JSON object"),
    ([{}], "a NoneType must be a JSON object"),
    ("from_step", "field training_phases.from_step is missing"),
    ("global_batch_size", "field training_phases.global_batch_size is missing"),
    ("order", "training_phases.from_step=[0, 0] must rise from 0; try [0, 1]"),
    ("first", "training_phases.from_step=[1] must rise from 0; try [0]"),
]


def entry_of_plan(problem: Problem, phase: BatchPhase) -> dict[str, Any]:
    """Return a plan as the command writes it."""
    training = replace(problem.config.training, global_batch_size=phase.global_batch_size)
    here = Problem.from_config(replace(problem.config, training=training))
    return plan_dict(Outcome(here, phase.plan, evaluate(phase.plan, here)))


@pytest.mark.parametrize(("broken", "message"), BROKEN)
def test_broken_phases_are_named(tmp_path: Path, llama: Problem, broken: Any, message: str) -> None:
    plan = entry_of_plan(llama, phases_of_sizes(llama)[0])
    entry: dict[str, Any] = {"from_step": 0, "global_batch_size": 8, "plan": plan}
    entries: Any = broken
    if isinstance(broken, str) and broken in entry:
        entries = [{key: value for key, value in entry.items() if key != broken}]
    elif broken == "order":
        entries = [entry, entry]
    elif broken == "first":
        entries = [entry | {"from_step": 1}]
    file = tmp_path / "plan.json"
    file.write_text(json.dumps({"training_phases": entries}))
    with pytest.raises(PlanError) as caught:
        read_phases(str(file))
    assert message in str(caught.value)
    assert str(file) in str(caught.value)
