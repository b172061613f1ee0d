"""Shares of activations and of optimizer state in host memory."""

import json
from dataclasses import replace

import pytest
import torch

from darts_parallel.config.schema import OFFLOADS
from darts_parallel.cost.cost_table import CostTable, HostMemory
from darts_parallel.cost.evaluation import evaluate, evaluate_batch
from darts_parallel.cost.hard_plans import HardPlans
from darts_parallel.cost.host_memory import OffloadedPlans
from darts_parallel.cost.pipeline import PipelineModel
from darts_parallel.cost.table import build_tables
from darts_parallel.errors import ConfigError, InfeasibleError, PlanError, UnsupportedError
from darts_parallel.exact.bounds import outer_lower_bounds
from darts_parallel.exact.layerwise import find_layerwise_plan
from darts_parallel.export import export_plan
from darts_parallel.gradient.descent import search
from darts_parallel.planner.elasticities import offload_slopes, time_elasticities
from darts_parallel.plans.legality import refuse_unexecutable
from darts_parallel.plans.strategy import Plan
from darts_parallel.problem.problem import load_problem
from darts_parallel.report.explanation import explain
from tests.support.random_plans import assert_surrogate_is_exact, random_plans
from tests.support.random_tables import random_table


def offloading(seed: int, *kinds: str, simulated: bool = False, factor: float = 1.0) -> CostTable:
    """A random table whose plans may offload; links are `factor` times as fast."""
    table = random_table(seed, pp=2, num_layers=6, num_choices=3, tightness=0.0)
    rng = torch.Generator().manual_seed(100 + seed)
    sent, state = (
        torch.rand(table.forward.shape, generator=rng, dtype=torch.float64) for _ in range(2)
    )
    model = PipelineModel(simulated=True, schedule="zero_bubble_h1", blocking=False)
    return replace(
        table,
        pipeline=model if simulated else table.pipeline,
        host=HostMemory(
            kinds=kinds or OFFLOADS,
            transfer=sent / factor,
            state=0.6 * table.static,
            state_transfer=state / factor,
            overlap=torch.full((table.forward.shape[1],), 1.6, dtype=torch.float64),
        ),
    )


def offloaded(table: CostTable, plans: HardPlans) -> OffloadedPlans:
    return OffloadedPlans(table, plans.outer, plans.choices, plans.stages(), table.host)


@pytest.mark.parametrize("simulated", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_the_surrogate_at_one_hot_weights_equals_the_hard_reading(
    seed: int, simulated: bool
) -> None:
    whole = offloading(seed, simulated=simulated)
    table = whole.select(list(range(whole.num_outer)) * 4)
    plans = random_plans(table, table.num_outer, torch.Generator().manual_seed(seed))
    assert_surrogate_is_exact(table, plans)


@pytest.mark.parametrize("kind", OFFLOADS)
def test_the_share_of_one_kind_is_the_least_that_fits(kind: str) -> None:
    used = 0
    for seed in range(6):
        table = offloading(seed, kind)
        plans = random_plans(table, 20, torch.Generator().manual_seed(seed))
        own = offloaded(table, plans)
        shares = own.fractions()
        assert not shares[..., 1 - OFFLOADS.index(kind)].any()
        memory, less = own.memory(shares), own.memory((shares - 1e-6).clamp(min=0.0))
        inside = (shares.sum(-1) > 1e-6) & (shares.sum(-1) < 1.0)
        assert bool(
            (memory[inside] <= table.capacity.expand_as(memory)[inside] * (1 + 1e-12)).all()
        )
        assert bool((less[inside] > table.capacity.expand_as(less)[inside]).all())
        used += int(inside.sum())
    assert used > 20


def test_no_mixture_of_two_kinds_on_a_grid_is_cheaper_for_its_device() -> None:
    for seed in range(3):
        table = replace(offloading(seed), in_flight=torch.full((2, 2), 3.0, dtype=torch.float64))
        plans = random_plans(table, 8, torch.Generator().manual_seed(seed))
        own = offloaded(table, plans)
        best, found = own.fractions(), own.fractions()[..., 0]
        seconds = own._seconds(found)
        fits = own.memory(best) <= table.capacity * (1 + 1e-9)
        for share in torch.linspace(0.0, 1.0, 41).tolist():
            other = torch.full_like(found, share)
            mixed = torch.stack([other, own._state_needed(other)], -1)
            legal = fits & (own.memory(mixed) <= table.capacity)
            assert bool((seconds[legal] <= own._seconds(other)[legal] * (1 + 1e-5)).all())


@pytest.mark.parametrize("simulated", [False, True])
def test_more_host_bandwidth_or_memory_is_never_worse(simulated: bool) -> None:
    for seed in range(4):
        slow, fast = (offloading(seed, simulated=simulated, factor=factor) for factor in (1.0, 1.7))
        roomy = replace(slow, capacity=1.1 * slow.capacity)
        plans = random_plans(slow, 20, torch.Generator().manual_seed(seed))
        one_kind = {}
        for name, table in (("slow", slow), ("fast", fast), ("roomy", roomy)):
            host = replace(table.host, kinds=("activation",))
            one_kind[name] = evaluate_batch(replace(table, host=host), plans)
        fits = one_kind["slow"].feasible
        for name in ("fast", "roomy"):
            assert bool(one_kind[name].feasible[fits].all())
            times = one_kind[name].iteration_time[fits]
            assert bool((times <= one_kind["slow"].iteration_time[fits] * (1 + 1e-12)).all())


def test_bounds_hold_for_plans_that_offload_and_exact_methods_only_bound() -> None:
    for seed in range(4):
        table = offloading(seed)
        plans = random_plans(table, 60, torch.Generator().manual_seed(seed))
        cost = evaluate_batch(table, plans)
        bounds = outer_lower_bounds(table)[plans.outer]
        assert bool((cost.iteration_time[cost.feasible] >= bounds[cost.feasible]).all())
        answer = find_layerwise_plan([table], "layerwise")
        assert answer.best is None
        assert not answer.proven
        assert "space.offload" in answer.note


TOY = [
    "model=toy",
    "cluster=toy",
    "training=toy",
    "space.pp=2",
    "space.tp=1",
    "space.zero_stage=0",
    "space.num_micro_batches=4",
    "space.recompute=none",
]


def test_a_search_that_offloads_fits_where_none_else_does_and_its_file_says_all() -> None:
    plain = load_problem(TOY)
    needed = max(
        evaluate(
            search(plain, 0, config=replace(plain.config.search, num_steps=4)).plan, plain
        ).memory_bytes
    )
    small = f"cluster.devices.toy.memory_GiB={(needed - 0.3e6) / 2**30}"
    quick = ["search.num_steps=12", "search.num_restarts=2", small]
    with pytest.raises(InfeasibleError):
        search(load_problem([*TOY, *quick]), 0)
    problem = load_problem([*TOY, *quick, "space.offload=[optimizer,activation]"])
    plan = search(problem, 0).plan
    cost = evaluate(plan, problem)
    assert cost.feasible
    assert len(plan.offload) == 2
    assert max(max(pair) for pair in plan.offload) > 0
    assert sum(cost.breakdown_s.values()) == pytest.approx(cost.iteration_time_s, rel=1e-9)
    names = tuple(layer.name for layer in problem.model.layers)
    data = plan.to_dict(names, range(problem.cluster.num_devices))
    assert Plan.from_dict(data) == plan
    data["stages"][0]["offload"] = {"activation": 1.5}
    with pytest.raises(
        PlanError, match=r"stages\[0\].offload.activation=1.5 must lie between 0 and 1"
    ):
        Plan.from_dict(data)
    told = explain(problem, plan)
    for stage, size in enumerate(cost.memory_bytes):
        assert sum(line.value for line in told.memory if line.stage == stage) == pytest.approx(
            size, rel=1e-9
        )
    for stage, seconds in enumerate(cost.stage_times_s):
        lines = [line.value for line in told.micro_batch if line.stage == stage]
        assert sum(lines) == pytest.approx(seconds, rel=1e-9)
    slopes = offload_slopes(plan, problem)
    assert all(slope[kind]["memory_bytes"] < 0 for slope in slopes for kind in OFFLOADS)
    assert time_elasticities(plan, problem)["devices.toy.host_bandwidth"] <= 0
    with pytest.raises(UnsupportedError, match="host memory"):
        export_plan(problem, plan, "megatron")
    with pytest.raises(UnsupportedError, match="host memory"):
        refuse_unexecutable(plan, problem)


def test_the_state_that_may_leave_is_that_of_the_node_type_with_most() -> None:
    def state(factor: float) -> torch.Tensor:
        factors = (
            f"cluster.devices.{name}.state_factor={own}"
            for name, own in (("toy", factor), ("toy_fast", 2))
        )
        given = [
            "model=toy",
            "training=toy",
            "cluster=toy_mixed",
            "space.pp=2",
            "space.offload=[optimizer]",
        ]
        return build_tables(load_problem([*given, *factors]))[0].host.state

    assert torch.equal(state(1.0), state(2.0))


def test_given_shares_hold_on_every_device_whatever_fits_and_cost_their_transfer() -> None:
    given = [*TOY, "search.num_steps=12", "search.num_restarts=2"]
    problem = load_problem([*given, "space.offload={optimizer: 0.5}"])
    plan = search(problem, 0).plan
    assert plan.offload == ((0.0, 0.5),) * 2
    bare = replace(plan, offload=())
    device = problem.cluster.groups[0].device
    found, without = evaluate(plan, problem), evaluate(bare, problem)
    for stage, size in enumerate(found.memory_bytes):
        assert size < without.memory_bytes[stage]
    moved = (without.memory_bytes[0] - found.memory_bytes[0]) / float(device.host_bandwidth)
    assert found.iteration_time_s - without.iteration_time_s >= moved * (1 - 1e-9)


@pytest.mark.parametrize(("share", "stage", "ratio"), [("1.0", 1, 1.0), ("0.25", 3, 0.25)])
def test_deepspeed_is_told_the_given_share_and_refuses_what_it_does_not_take(
    share: str, stage: int, ratio: float
) -> None:
    words = ["model=toy", "cluster=toy", "training=toy", "trainer=deepspeed", "space.tp=1"]
    words += ["training.software=null"]
    words += ["space.pp=1", "search.num_steps=8", f"space.offload={{optimizer: {share}}}"]
    problem = load_problem([*words, f"space.zero_stage={stage}"])
    plan = search(problem, 0).plan
    settings = json.loads(export_plan(problem, plan, "deepspeed").files["deepspeed.json"])
    told = settings["zero_optimization"]["offload_optimizer"]
    assert told == {"device": "cpu", "pin_memory": True, "ratio": ratio}
    # torch's optimizers may then stay: DeepSpeed asks for its own otherwise
    assert settings["zero_force_ds_cpu_optimizer"] is False
    lower = f"space.zero_stage={0 if stage == 1 else 2}"
    with pytest.raises(ConfigError, match=r"trainer=deepspeed runs no plan of this job.*offload"):
        search(load_problem([*words, lower]), 0)
    free = [word for word in words if word != "trainer=deepspeed"]
    other = load_problem([*free, "space=uniform", lower])
    with pytest.raises(
        UnsupportedError,
        match=r"of the optimizer in host memory with zero_stage=",
    ):
        export_plan(other, search(other, 0).plan, "deepspeed")
