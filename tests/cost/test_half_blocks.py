"""Half blocks (`space.cut`): together they cost what their block costs; a stage may begin between them."""

import pytest
import torch

from darts_parallel.cost.evaluation import evaluate_batch
from darts_parallel.cost.hard_plans import HardPlans
from darts_parallel.cost.table import build_tables
from darts_parallel.errors import ConfigError, UnsupportedError
from darts_parallel.exact.enumeration import brute_force
from darts_parallel.export import export_plan, refusals
from darts_parallel.gradient.descent import search
from darts_parallel.plans.strategy import LayerStrategy, Plan
from darts_parallel.problem.problem import Problem, load_problem
from tests.support.exact_check import check
from tests.support.export_plans import LATENT, LLAMA, MIXTURE, TOY
from tests.support.optima import assert_same_optimum
from tests.support.random_plans import random_plans

HALVES = "space.cut=half_block"
TINY = [
    *TOY,
    "model.num_layers=1",
    "space.pp=2",
    "space.zero_stage=1",
    "space.recompute=[none,full]",
    "space.num_micro_batches=8",
    "cluster.devices.toy.layer_overhead_us=0",
    "search.num_steps=40",
]
SIMULATED = ["space.schedules=[1f1b,zero_bubble_h1]"]
FIELDS = ("forward", "backward", "weight_gradient", "sync", "static", "activation", "for_weights")


def both(overrides: list[str]) -> tuple[Problem, Problem]:
    return load_problem(overrides), load_problem([*overrides, HALVES])


def of_whole(problem: Problem) -> torch.Tensor:
    """Layer of the whole-block chain that each layer belongs to."""
    names = [".".join(layer.name.split(".")[:2]) for layer in problem.model.layers]
    return torch.tensor([list(dict.fromkeys(names)).index(name) for name in names])


@pytest.mark.parametrize(
    "model",
    [
        TOY,
        MIXTURE,
        LATENT,
        [*LLAMA, "training.lora_rank=4"],
        [*TOY, "model.block_norms=4"],
        [*LLAMA, "model.mtp_num_layers=1", "space.cp=2"],
    ],
)
def test_two_halves_cost_what_their_block_costs(model: list[str]) -> None:
    layers, halves = both([*model, "space.pp=[1,2]"])
    assert halves.model.num_parameters == layers.model.num_parameters
    for one, two in zip(build_tables(layers), build_tables(halves), strict=True):
        places = of_whole(halves)
        for name in FIELDS:
            mine, parts = getattr(one, name), getattr(two, name)
            sums = torch.zeros_like(mine).index_add(-2, places, parts)
            torch.testing.assert_close(sums, mine, rtol=1e-12, atol=0)
            assert bool((parts >= 0).all())
        for name, parts in two.terms.items():
            sums = torch.zeros_like(one.terms[name]).index_add(2, places, parts)
            torch.testing.assert_close(sums, one.terms[name], rtol=1e-9, atol=1e-15)
        torch.testing.assert_close(two.working, one.working.index_select(1, places))


def doubled(plans: HardPlans, places: torch.Tensor) -> HardPlans:
    """Plans of whole blocks as those of halves."""
    return HardPlans(
        plans.outer, plans.choices[:, places], torch.searchsorted(places, plans.first_layers)
    )


@pytest.mark.parametrize("more", [[], SIMULATED])
def test_plans_cut_at_whole_blocks_cost_the_same(more: list[str]) -> None:
    layers, halves = both([*TOY, "space.pp=[2,4]", *more])
    for one, two in zip(build_tables(layers), build_tables(halves), strict=True):
        plans = random_plans(one, 16, torch.Generator().manual_seed(0))
        cost, same = (
            evaluate_batch(one, plans),
            evaluate_batch(two, doubled(plans, of_whole(halves))),
        )
        torch.testing.assert_close(same.iteration_time, cost.iteration_time, rtol=1e-12, atol=0)
        torch.testing.assert_close(same.memory, cost.memory, rtol=1e-12, atol=0)
        assert torch.equal(same.feasible, cost.feasible)


@pytest.mark.parametrize("mode", ["stagewise", "layerwise"])
def test_the_optimum_is_proven_found_and_never_worse(mode: str) -> None:
    layers, halves = both([*TINY, f"space={mode}"])
    best = assert_same_optimum(build_tables(halves), mode)
    assert best < brute_force(build_tables(layers), mode).cost * 0.999
    assert search(halves).iteration_time_s == pytest.approx(best, rel=1e-9)


def test_simulated_pipelines_are_cut_there_too() -> None:
    layers, halves = (
        check(own, "exhaustive")
        for own in both([*TINY, *SIMULATED, "space=uniform", "space.axis_order=tp-dp-pp"])
    )
    assert layers.proven
    assert halves.proven
    assert halves.iteration_time_s < layers.iteration_time_s * 0.999
    assert halves.plan is not None
    assert Plan.from_dict(halves.plan.to_dict([""] * 5, range(8))) == halves.plan


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("model.num_encoder_layers=2", "decoder blocks hold two attentions"),
        ("model.hybrid_override_pattern=*-*-", "pattern names single layers"),
        ("model.block_norms=1", "share one norm"),
        ("cost=searcher", "knows no stages"),
    ],
)
def test_what_has_no_halves_is_refused(model: str, words: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"space.cut=half_block must not go with .*{words}; try layer\."
    ):
        load_problem([*TOY, model, HALVES])


def test_megatron_writes_them_as_a_hybrid_and_others_say_that_they_cannot() -> None:
    problem = load_problem([*LLAMA, HALVES])
    plan = Plan(4, (0, 6, 19), (LayerStrategy(2, 2, 1, "full"),) * 19)
    text = export_plan(problem, plan, "megatron").files["megatron.sh"]
    assert '--hybrid-layer-pattern "*-*-*|-*-*-*-*-*-"' in text
    assert "--position-embedding-type rope" in text
    assert "--recompute-num-layers 2" in text
    assert not refusals(problem, plan, "torch")
    for name in ("torchtitan", "deepspeed", "accelerate", "nanotron", "galvatron"):
        with pytest.raises(UnsupportedError, match="half_block, and its stages hold whole blocks"):
            export_plan(problem, plan, name)
    predicting = load_problem([*LLAMA, HALVES, "model.mtp_num_layers=1"])
    with pytest.raises(UnsupportedError, match="mtp_num_layers=1 with half blocks"):
        export_plan(predicting, Plan(4, (0, 20), (LayerStrategy(2, 4),) * 20), "megatron")
