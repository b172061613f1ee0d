import random
import re
from dataclasses import replace

import pytest
import torch

from darts_parallel import evaluate, load_problem, plan
from darts_parallel.cost import build_tables
from darts_parallel.cost.tolerances import PLAN_MEMORY_TOLERANCE
from darts_parallel.errors import InfeasibleError
from darts_parallel.planner._session import Asked
from darts_parallel.planner.memory_chance import ladder


@pytest.mark.parametrize("seed", range(4))
def test_a_margin_is_left_free_and_more_of_it_never_makes_the_optimum_better(seed: int) -> None:
    chosen = random.Random(seed)
    job = [
        "model=toy",
        "training=toy",
        "cluster=toy",
        "search=exact",
        "space.out_of_memory=0.5",
        f"training.global_batch_size={chosen.choice([8, 16])}",
        f"cluster.devices.toy.memory_GiB={chosen.uniform(0.13, 0.14)}",
    ]
    before = 0.0
    for margin in (0.0, 0.1, 0.2):
        problem = load_problem([*job, f"space.memory_margin={margin}"])
        best = plan(problem).plan
        cost = evaluate(best, problem)
        assert cost.feasible
        for used, whole in zip(cost.memory_bytes, cost.capacity_bytes, strict=True):
            assert whole == pytest.approx(problem.cluster.groups[0].device.memory)
            assert used <= (1.0 - margin) * whole * (1.0 + PLAN_MEMORY_TOLERANCE)
        assert cost.iteration_time_s >= before * (1.0 - 1e-12)
        before = cost.iteration_time_s
    wide = [*job, "space.memory_margin=0.9"]
    with pytest.raises(InfeasibleError, match=r"freeing space\.memory_margin") as refused:
        plan(load_problem(wide))
    sizes = re.search(
        r"needs ([\d.]+) GiB of the ([\d.]+) GiB .*memory_GiB=([\d.]+)", str(refused.value)
    )
    needed, usable, enough = map(float, sizes.groups())
    whole = float(problem.cluster.groups[0].device.memory)
    assert usable == pytest.approx(0.1 * whole / 2**30, abs=0.006)
    assert enough == pytest.approx(needed / 0.1, abs=0.07)
    assert plan(load_problem([*wide, f"cluster.devices.toy.memory_GiB={enough}"])).plan


@pytest.mark.parametrize("memory", [0.0027, 0.0035])
def test_a_margin_of_half_the_memory_is_half_the_memory(memory: float) -> None:
    """The margin took the place of the headroom: a risky plan had a chance of 0."""
    job = ["model=toy", "training=toy", "cluster=toy", "search=exact", "space.tp=1", "space.pp=2"]
    job.append("cluster.devices.toy.reserved_GiB=0.001")
    half = plan(load_problem([*job, f"cluster.devices.toy.memory_GiB={memory}"]))
    whole = [f"cluster.devices.toy.memory_GiB={2 * memory}", "space.memory_margin=0.5"]
    margin = plan(load_problem([*job, *whole]))
    assert margin.plan == half.plan
    assert margin.out_of_memory == pytest.approx(half.out_of_memory, rel=1e-6)
    assert half.out_of_memory is not None
    assert half.out_of_memory > 0.01
    levels = {rung.name: rung.seconds for rung in ladder(half)}
    assert "safe" in levels
    assert levels == {rung.name: rung.seconds for rung in ladder(margin)}


def test_the_question_with_less_memory_has_the_tables_of_the_tighter_problem() -> None:
    problem = load_problem(["model=toy", "training=toy", "cluster=toy", "space=uniform"])
    tight = replace(problem, headroom=0.3)
    asked, again = Asked.of(problem), Asked.of(tight)
    own = asked.at(0.3)
    for mine, built, roomy in zip(own.tables, again.tables, asked.tables, strict=True):
        assert mine.choices == built.choices
        assert torch.equal(mine.capacity, built.capacity)
        assert torch.equal(mine.static, built.static)
        assert mine.static.data_ptr() == roomy.static.data_ptr(), "nothing else is copied"
    assert own.problem.headroom == 0.3


def test_neighbouring_rows_of_a_table_share_its_memory() -> None:
    table = build_tables(load_problem(["model=toy", "training=toy", "cluster=toy"]))[0]
    for rows in ([1, 2], [0], [2, 0], [0, 2], []):
        part = table.select(torch.tensor(rows, dtype=torch.long))
        assert torch.equal(part.forward, table.forward[rows])
        assert part.num_micro_batches.tolist() == table.num_micro_batches[rows].tolist()
        for name, seconds in part.terms.items():
            assert torch.equal(seconds, table.terms[name][rows])
    assert table.select([1, 2]).forward.data_ptr() == table.forward[1].data_ptr()


@pytest.mark.slow
def test_a_job_of_a_thousand_layers_gets_a_plan_after_all_steps() -> None:
    """The descent has half of the limit, several times what it needs."""
    job = ["model.num_layers=1000", "cluster=h100_16x8", "training.global_batch_size=512"]
    few = [
        "search.num_steps=4",
        "search.max_seconds=24",
        "search.polish=false",
        "verification.enabled=false",
        "space.out_of_memory=0.5",
        "space.tp=8",
        "space.num_micro_batches=64",
    ]
    found = plan(load_problem([*job, *few]))
    assert found.result is not None
    assert found.result.steps == 4
