"""Keys that few jobs set: each changes what docs/reference/keys.md says that it changes."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from darts_parallel.config.trainer import Trainer, read_trainer
from darts_parallel.cost.compute import fused_attention_seconds
from darts_parallel.cost.evaluation import evaluate
from darts_parallel.errors import ConfigError, UnsupportedError
from darts_parallel.export import export_plan
from darts_parallel.plans.own_stages import own_cuts
from darts_parallel.plans.strategy import LayerStrategy, Plan
from darts_parallel.plans.trainers import job_facts, trainer_runs, trainer_runs_plan
from darts_parallel.problem.problem import Problem, load_problem
from experiments.key_reference import REFERENCE
from tests.support.export_plans import CASES

DOCUMENTED = (
    "mxfp8_efficiency",
    "nvfp4_efficiency",
    "runs_of",
    "lossy_block",
    "profile_gpu",
    "indexer_num_heads",
    "mamba_conv_kernel",
    "moe_router_pre_softmax",
    "moe_router_topk_scaling_factor",
    "own_model",
    "own_stages",
    "whole_context_groups",
    "half_blocks",
    "model_parts",
)


@pytest.mark.parametrize("key", DOCUMENTED)
def test_a_rare_key_is_documented(key: str) -> None:
    page = REFERENCE.read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("|") and f"{key}`" in line]
    assert len(rows) == 1
    assert len(rows[0].split("|")[2].strip()) > 20


def seconds(*overrides: str, **choices: int) -> float:
    """Price one stage of toy layers under one strategy."""
    problem = load_problem(["model=toy", "training=toy", "cluster=toy", *overrides])
    plan = Plan(1, (0, problem.num_layers), (LayerStrategy(1, 8, **choices),) * problem.num_layers)
    return evaluate(plan, problem).iteration_time_s


@pytest.mark.parametrize("precision", ["mxfp8", "nvfp4"])
def test_the_efficiency_of_narrow_products_scales_their_seconds(precision: str) -> None:
    device = "cluster.devices.toy"
    peaks = f"+{device}.peak_TFLOPs.{precision}=2.0"
    given = (f"training.precision={precision}", peaks)
    fast, slow = (
        seconds(*given, f"{device}.{precision}_efficiency={share}") for share in (0.9, 0.3)
    )
    assert slow > 1.2 * fast
    other = {"mxfp8": "nvfp4", "nvfp4": "mxfp8"}[precision]
    assert (
        seconds(*given, f"{device}.{precision}_efficiency=0.9", f"{device}.{other}_efficiency=0.3")
        == fast
    )


def test_attention_in_8_bits_goes_with_nvfp4_and_is_at_most_twice_as_fast_as_in_16() -> None:
    job = ["training.precision=nvfp4", "training.fp8_dot_product_attention=true"]
    efficient = "cluster.devices.b200.nvfp4_efficiency=0.9"
    problem = load_problem(["model=llama3_8b", "cluster=b200_8x", *job, efficient])
    device, one = problem.cluster.groups[0].device, torch.ones(1)
    (core,) = problem.model.layers[1].cores
    narrow, whole = (
        fused_attention_seconds(core, one, 4096, one, device, eight) for eight in (True, False)
    )
    assert float(whole / narrow) == pytest.approx(2.0)


def test_smaller_blocks_of_lossy_collectives_send_more_scales() -> None:
    short, long = (
        seconds(f"cost.lossy_block={block}", "space.grad_comm_bits=4", grad_comm_bits=4)
        for block in (16, 256)
    )
    assert short > long


def parameters(*overrides: str) -> int:
    return load_problem([*overrides]).model.num_parameters


def test_an_indexer_has_weights_for_each_of_its_heads() -> None:
    job = ("model=deepseek_v3", "training=deepseek_v3", "cluster=h100_128x8")
    one = parameters(*job, "model.indexer_num_heads=1", "model.indexer_head_dim=128")
    two = parameters(*job, "model.indexer_num_heads=2", "model.indexer_head_dim=128")
    assert two > one > parameters(*job)


def test_the_convolution_of_mamba_has_weights_for_each_token_it_sees() -> None:
    job = ("model=nemotron_h_8b", "training=nemotron_h_8b", "cluster=h100_8x8")
    four, five, six = (parameters(*job, f"model.mamba_conv_kernel={k}") for k in (4, 5, 6))
    assert six - five == five - four > 0


def test_figures_of_runs_hold_for_their_framework_alone() -> None:
    run = "{log: a.log, error: 0.1, sd: 0.1, slopes: {}}"
    job = ["model=toy", "training=toy", "cluster=toy", f"cluster.runs=[{run}]"]
    given = [*job, "cluster.runs_of=torchtitan"]
    assert load_problem([*given, "training.software=torchtitan"]).software.name == "torchtitan"
    with pytest.raises(ConfigError, match=r"try training\.software=torchtitan\."):
        load_problem(given)


def test_a_profile_names_its_gpu_in_its_own_words(tmp_path: Path) -> None:
    header = "source,model,gpu,tp,layer_index,layer_kind,forward_s"
    rows = [header]
    for gpu, block_s in (("first card", 0.01), ("second card", 0.02)):
        rows.append(f"x,toy,{gpu},1,0,embedding,0.001")
        rows += [f"x,toy,{gpu},1,{index},transformer,{block_s}" for index in (1, 2)]
    (tmp_path / "layer_forward_seconds.csv").write_text("\n".join(rows) + "\n")
    multipliers = "model,gpu,layer_kind,micro_batch,multiplier\n"
    for gpu in ("first card", "second card"):
        multipliers += f"toy,{gpu},transformer,1,1\n"
    (tmp_path / "micro_batch_multipliers.csv").write_text(multipliers)
    job = ["model=toy", "training=toy", "cluster=toy", "cost=profiled", f"cost.profile={tmp_path}"]
    one = torch.ones(1, dtype=torch.float64)
    for gpu, block_s in (("first card", 0.01), ("second card", 0.02)):
        measured = load_problem([*job, f"cost.profile_gpu={gpu}"]).measured
        assert measured is not None
        found = measured.figures("toy", "block", (one, one), one[None], "forward")
        assert found is not None
        assert float(found[0]) == pytest.approx(block_s)
    with pytest.raises(ConfigError, match=r"cost\.profile_gpu=third must be one of"):
        load_problem([*job, "cost.profile_gpu=third"])


def test_a_router_is_exported_with_its_softmax_and_its_factor() -> None:
    problem, plan = CASES["experts_folded"].build()
    for key, value, flag in (
        ("moe_router_pre_softmax", True, "--moe-router-pre-softmax"),
        ("moe_router_topk_scaling_factor", 2.5, "--moe-router-topk-scaling-factor 2.5"),
    ):
        model = replace(problem.config.model, **{key: value})
        changed = Problem.from_config(replace(problem.config, model=model))
        assert flag in export_plan(changed, plan, "megatron").files["megatron.sh"]
        assert flag not in export_plan(problem, plan, "megatron").files["megatron.sh"]


def runs(rules: Trainer, problem: Problem, strategy: LayerStrategy, pp: int, cp: int) -> bool:
    job = job_facts(problem.model, problem.training, problem.software)
    return trainer_runs(rules, job, pp, cp, "1f1b", strategy)


def test_trainers_that_cut_stages_or_group_context_ranks_themselves(toy_problem: Problem) -> None:
    model, count = toy_problem.model, toy_problem.num_layers
    job = job_facts(model, toy_problem.training, toy_problem.software)
    (cut,) = own_cuts(model.config, 2)
    for rules, first, takes in (("why", cut, True), ("why", cut - 1, False), ("", cut - 1, True)):
        plan = Plan(4, (0, first, count), (LayerStrategy(4, 1),) * count)
        assert trainer_runs_plan(Trainer(own_stages=rules), job, model, plan) is takes
    whole = Trainer(whole_context_groups=True)
    for shards, allowed in ((2, True), (1, False)):
        split = LayerStrategy(4, 1, 3, shard_size=shards)
        assert runs(whole, toy_problem, split, pp=1, cp=2) == allowed
        assert runs(Trainer(), toy_problem, split, pp=1, cp=2)


def exported(problem: Problem, plan: Plan, **abilities: object) -> bool:
    """Whether Megatron takes a plan once its abilities are changed."""
    trainer = replace(read_trainer("megatron"), **abilities)  # type: ignore[arg-type]
    changed = replace(problem, config=replace(problem.config, trainer=trainer))
    try:
        export_plan(changed, plan, "megatron")
    except UnsupportedError:
        return False
    return True


def test_a_trainer_with_models_of_its_own_refuses_parts_that_they_lack() -> None:
    problem, plan = CASES["uneven_pipeline"].build()
    windowed = Problem.from_config(
        replace(problem.config, model=replace(problem.config.model, sliding_window=16))
    )
    assert exported(windowed, plan)
    assert not exported(windowed, plan, model_parts=[])
    assert exported(windowed, plan, model_parts=[], own_model=False)


@pytest.mark.parametrize(("norms", "trainer"), [(None, "megatron"), (4, "accelerate")])
def test_the_trainer_that_a_refusal_names_has_all_parts_of_the_model(
    norms: int | None, trainer: str
) -> None:
    """Gemma 2 was sent from torchtitan to Megatron-LM, which lacks its norms."""
    problem, plan = CASES["uneven_pipeline"].build()
    model = replace(problem.config.model, sliding_window=16, block_norms=norms)
    windowed = Problem.from_config(replace(problem.config, model=model))
    with pytest.raises(
        UnsupportedError, match=f"which no file written for it has; try export={trainer}"
    ):
        export_plan(windowed, plan, "torchtitan")
