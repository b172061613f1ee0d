"""Plans that recompute the first blocks of every stage, or every n-th one."""

from dataclasses import replace

import pytest

from darts_parallel import Plan, Problem, evaluate, load_problem, plan
from darts_parallel.export import export_plan
from darts_parallel.planner import Planned, tightened
from darts_parallel.report.text import claim

JOB = (
    *("model=llama2_7b", "model.num_layers=8", "cluster=a10_4x4", "search=exact"),
    *("training.global_batch_size=64", "space.pp=2", "space.tp=1", "space.zero_stage=1"),
    *("space.micro_batch_size=1", "space.recompute=[none,full]", "space.out_of_memory=0.5"),
)
MEGATRON = "trainer=megatron"


def memory(gib: float) -> str:
    return f"cluster.devices.a10.memory_GiB={gib:.4f}"


@pytest.fixture(scope="module")
def halfway() -> str:
    """Return a memory between the peaks without and with recomputation."""
    peaks = []
    for recompute in ("none", "full"):
        roomy = load_problem([*JOB, MEGATRON, memory(80), f"space.recompute={recompute}"])
        peaks.append(max(evaluate(plan(roomy).plan, roomy).memory_bytes) / 2**30)
    assert peaks[1] < 0.9 * peaks[0]
    return memory(sum(peaks) / 2)


@pytest.fixture(scope="module")
def problem(halfway: str) -> Problem:
    return load_problem([*JOB, MEGATRON, halfway])


@pytest.fixture(scope="module")
def found(problem: Problem) -> Planned:
    return plan(problem)


def first_blocks(own: Plan, count: int) -> Plan:
    """Return a plan of pp 2 with `count` first blocks of both stages recomputed, and no other."""
    layers = [replace(layer, recompute="none") for layer in own.layers]
    for start in (1, own.boundaries[1]):
        for index in range(start, start + count):
            layers[index] = replace(layers[index], recompute="full")
    return replace(own, layers=tuple(layers))


def test_the_plan_is_the_fastest_of_its_kind(problem: Problem, found: Planned) -> None:
    """Price all numbers of first blocks by hand: none that fits is faster."""
    tight = tightened(problem)
    own = found.plan
    recomputed = sum(layer.recompute == "full" for layer in own.layers)
    assert len(set(own.layers)) == 2
    assert own == first_blocks(own, recomputed // 2)
    costs = [evaluate(first_blocks(own, count), tight) for count in range(5)]
    fitting = [cost.iteration_time_s for cost in costs if cost.feasible]
    assert evaluate(own, tight).iteration_time_s == pytest.approx(min(fitting), rel=1e-12)
    assert len(fitting) < len(costs)


def test_it_is_faster_than_the_optimal_uniform_plan(problem: Problem, found: Planned) -> None:
    (uniform,) = [answer for answer in found.answers if answer.name == "exhaustive"]
    assert found.result is not None
    assert uniform.proven
    assert found.result.iteration_time_s < 0.99 * uniform.iteration_time_s
    assert uniform.gap < -0.01
    words = claim(problem, evaluate(found.plan, problem), found.answers)
    assert "faster than the optimal uniform plan" in words


@pytest.mark.parametrize("gib", [11.5, 12.0, 13.0])
def test_the_default_search_leaves_as_little_memory_free_as_these_plans_allow(gib: float) -> None:
    """`search=exact` tries all levels of free memory, from the loosest on."""
    limit = "space.out_of_memory=0.2"
    exact = plan(load_problem([*JOB, MEGATRON, memory(gib), limit]))
    few = ("search=gradient", "search.num_steps=2", "search.num_restarts=2")
    own = plan(load_problem([*JOB, MEGATRON, memory(gib), limit, *few]))
    assert own.result is not None
    assert exact.result is not None
    assert "full" in {layer.recompute for layer in own.plan.layers}
    assert own.result.iteration_time_s == pytest.approx(exact.result.iteration_time_s, rel=1e-9)
    assert (own.out_of_memory or 0.0) <= 0.2


def test_the_file_says_what_the_price_counts(problem: Problem, found: Planned) -> None:
    text = export_plan(problem, found.plan, "megatron").files["megatron.sh"]
    recomputed = sum(layer.recompute == "full" for layer in found.plan.layers)
    assert "--recompute-method block" in text
    assert f"--recompute-num-layers {recomputed // 2}\n" in text


def every_nth(own: Plan, period: int) -> Plan:
    """Return a plan with the last of every `period` blocks of a stage recomputed, and no other.

    Blocks count from 1 in each process, as in torchtitan 0.2.2.
    """
    last = len(own.layers) - 2
    layers = []
    for index, layer in enumerate(own.layers):
        place = index - (own.boundaries[1] - 1 if index >= own.boundaries[1] else 0)
        repeated = 0 < index < last and place % period == 0
        layers.append(replace(layer, recompute="full" if repeated else "none"))
    return replace(own, layers=tuple(layers))


@pytest.mark.parametrize("gib", [11.0, 12.0])
def test_torchtitan_0_2_recomputes_every_nth_block(gib: float) -> None:
    """Price all periods by hand: none that fits is faster, and the file says the period."""
    problem = load_problem([*JOB, "trainer=torchtitan_0_2", memory(gib)])
    tight = tightened(problem)
    planned = plan(problem)
    assert planned.result is not None
    costs = {n: evaluate(every_nth(planned.plan, n), tight) for n in range(1, 6)}
    seconds = {n: cost.iteration_time_s for n, cost in costs.items() if cost.feasible}
    best = min(seconds, key=lambda period: seconds[period])
    assert 1 < best < 5
    assert planned.plan == every_nth(planned.plan, best)
    assert planned.result.iteration_time_s == pytest.approx(seconds[best], rel=1e-12)
    text = export_plan(problem, planned.plan, "torchtitan_0_2").files["torchtitan.toml"]
    assert f'mode = "selective"\nselective_ac_option = "{best}"\n' in text


def test_others_keep_the_uniform_plan(halfway: str) -> None:
    """Another trainer has no such flag, and a plan that fits without recomputation needs none."""
    for given in (["trainer=torchtitan", halfway], [MEGATRON, memory(80)]):
        own = plan(load_problem([*JOB, *given])).plan
        assert len(set(own.layers)) == 1
