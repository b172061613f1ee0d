import re
from dataclasses import replace
from io import StringIO

import pytest
import torch
from rich.console import Console

from darts_parallel.cli._arguments import flags_first
from darts_parallel.cost.evaluation import evaluate
from darts_parallel.cost.table import build_tables
from darts_parallel.plans.space import outer_spaces
from darts_parallel.plans.strategy import LayerStrategy, Plan
from darts_parallel.problem.problem import Problem, load_problem
from darts_parallel.report.explanation import (
    FORMULAS,
    Explanation,
    Line,
    explain,
    memory_parts,
    render_explanation,
)
from tests.support.commands import QUIET, TOY, Command
from tests.support.export_plans import LLAMA, MIXTURE, plan_of
from tests.support.layer_kinds import HYBRID, PREDICTION
from tests.support.random_plans import random_plans

PROBLEMS = {
    "toy": ["model=toy", "cluster=toy", "training=toy"],
    "llama": LLAMA,
    "unfused, tied, one stage": [
        "model=toy",
        "cluster=toy",
        "training=toy",
        "training.attention_kernel=unfused",
        "space.pp=1",
    ],
    "hybrid": HYBRID,
    "experts": ["model=toy_moe", "cluster=toy", "training=toy"],
    "offload": [
        "model=toy",
        "cluster=toy",
        "training=toy",
        "cluster.devices.toy.host_bandwidth_GBps=25",
        "space.offload=[activation,optimizer]",
        "cluster.devices.toy.memory_GiB=0.1003",
    ],
    "prediction": PREDICTION,
    "adapters": [*MIXTURE, "training.lora_rank=4", "training.lora_targets=[linear_qkv,linear_fc2]"],
    "simulated": [*LLAMA, "cost.pipeline=simulated"],
    "half blocks": [*MIXTURE, "space.cut=half_block"],
    "dropped adapters": [
        *LLAMA,
        "training.lora_rank=4",
        "training.lora_dropout=0.1",
        "training.frozen_bits=4",
    ],
    "recorded iterations": [*LLAMA, "training.cuda_graphs=full_iteration"],
}


def by_stage(lines: list[Line], pp: int) -> list[float]:
    return [sum(line.value for line in lines if line.stage == stage) for stage in range(pp)]


def require_sums(problem: Problem, plan: Plan) -> Explanation:
    found, cost = explain(problem, plan), evaluate(plan, problem)
    assert by_stage(found.memory, plan.pp) == pytest.approx(cost.memory_bytes, rel=1e-9)
    assert by_stage(found.micro_batch, plan.pp) == pytest.approx(cost.stage_times_s, rel=1e-9)
    assert sum(line.value for line in found.iteration) == pytest.approx(
        cost.iteration_time_s, rel=1e-9
    )
    lines = found.memory + found.micro_batch
    assert all((line.value >= 0 or plan.offload) and all(line.described) for line in lines)
    return found


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_lines_of_random_plans_sum_to_the_totals(name: str) -> None:
    problem = load_problem(PROBLEMS[name])
    rng, explained = torch.Generator().manual_seed(0), 0
    for space in outer_spaces(problem):
        table = build_tables(problem, [space])[0]
        plan = random_plans(table, 1, rng).to_plan(0, table)
        explained += len(require_sums(problem, plan).memory) > 0
    assert explained >= 1


def test_offloaded_bytes_leave_optimizer_state_and_activations() -> None:
    """They were one line without a kind, and the bars had a workspace of -17.3 GiB."""
    problem = load_problem(PROBLEMS["offload"])
    plan = plan_of(problem, LayerStrategy(1, 4, 1), 2, (3,))
    plan = replace(plan, offload=((0.5, 1.0), (0.5, 1.0)))
    lines = require_sums(problem, plan).memory
    for stage, parts in enumerate(memory_parts(problem, plan)):
        own = [line for line in lines if line.stage == stage]
        kept = [line.value for line in own if line.term == "activations"]
        state = ("parameters", "gradients", "copies and buffers")
        held = [line.value for line in own if line.term in state]
        assert parts["state"] == pytest.approx(sum(held), abs=1.0)
        # half of what is kept, and half of the largest layer on its way
        assert sum(kept) / 2 < parts["activations"] <= sum(kept) / 2 + max(kept)
        assert parts["workspace"] >= 0


def test_context_parallel_seconds_and_bytes_are_explained(llama_problem: Problem) -> None:
    plan = plan_of(llama_problem, LayerStrategy(1, 1, 3), 4, (5,), cp=4)
    found = require_sums(llama_problem, plan)
    assert "context_parallel" in {line.term for line in found.micro_batch}


def test_every_term_names_a_formula_and_the_print_holds_every_line(toy_problem: Problem) -> None:
    plan = plan_of(toy_problem, LayerStrategy(2, 2, 2, "full", True), 2, (3,))
    found = explain(toy_problem, plan)
    lines = [*found.memory, *found.micro_batch, *found.iteration]
    assert {line.term for line in lines} <= set(FORMULAS)
    out = StringIO()
    render_explanation(found, Console(file=out, width=200, color_system=None))
    text = out.getvalue()
    assert all(line.term.replace("_", " ") in text and line.described[0] in text for line in lines)
    assert len(re.findall(r"^\d*\s+sum\s", text, re.MULTILINE)) == 2 * plan.pp + 1


def test_the_command_explains(command: Command) -> None:
    assert flags_first(["explain", "é/a.json"])[0] == "plan='é/a.json'"
    assert flags_first(["plan='é'", "model.path=é", "seq=1"])[:2] == ["plan='é'", "model.path='é'"]
    assert flags_first([*TOY, "--explain"]) == flags_first([*TOY, "explain=true"])
    outcome = command("--explain", *TOY, *QUIET)
    assert outcome.status == 0, outcome.err
    assert "Memory of a device, by stage" in outcome.out
    assert "Seconds of an iteration" in outcome.out
    assert "Korthikanti et al. 2022" in outcome.out
