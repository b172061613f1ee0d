import ast
import json
import random
import sys
from dataclasses import replace
from itertools import pairwise
from math import prod
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from darts_parallel.config.schema import EXPORTS
from darts_parallel.errors import UnsupportedError
from darts_parallel.export import TARGETS, export_plan
from darts_parallel.plans.own_stages import own_cuts, own_stage_refusal
from darts_parallel.plans.strategy import LayerStrategy, Plan
from darts_parallel.problem.problem import Problem, load_problem
from tests.support.export_plans import CASES, GOLDEN, LLAMA, NAMES, TOY, files_of, plan_of


@pytest.fixture(scope="module")
def llama() -> Problem:
    return load_problem(LLAMA)


@pytest.mark.parametrize(("name", "target"), NAMES)
def test_an_export_is_its_golden_file(name: str, target: str) -> None:
    # `python -m tests.support.export_plans` writes them again
    for file, text in files_of(name, target).items():
        assert text == (GOLDEN / name / file).read_text(encoding="utf-8"), file


def test_every_target_has_a_golden_file_and_a_place_in_the_schema() -> None:
    assert set(TARGETS) == set(EXPORTS) == {target for _, target in NAMES}


# Hugging Face: accelerate and DeepSpeed


def loaded_by(text: str, model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return what `planned_model` of a module asks of transformers and PEFT, which are stand-ins."""
    asked: dict[str, Any] = {}

    def from_pretrained(name: str, **given: Any) -> nn.Module:
        asked.update(given)
        return model

    def get_peft_model(given: nn.Module, adapters: dict[str, Any]) -> nn.Module:
        asked["adapters"] = adapters
        return given

    loader = SimpleNamespace(from_pretrained=from_pretrained)
    transformers = SimpleNamespace(AutoModelForCausalLM=loader)
    peft = SimpleNamespace(LoraConfig=dict, get_peft_model=get_peft_model)
    everything = SimpleNamespace(Accelerator=None, GradientAccumulationPlugin=None)
    everything.ParallelismConfig = None
    stand_ins = {"transformers": transformers, "peft": peft, "accelerate": everything}
    stand_ins |= {f"accelerate.{part}": everything for part in ("utils", "parallelism_config")}
    for name, stand_in in stand_ins.items():
        monkeypatch.setitem(sys.modules, name, cast(ModuleType, stand_in))
    scope: dict[str, Any] = {}
    exec(compile(text, "plan", "exec"), scope)
    given = ("accelerator", "some/model") if "Accelerator" in text else ("some/model",)
    assert scope["planned_model"](*given) is model
    return asked


def block(*names: str) -> nn.Module:
    """A model whose one block has linear modules of these names."""
    parts = nn.ModuleDict({name: nn.Linear(2, 2) for name in names})
    parts["experts"] = nn.ModuleDict({name: nn.Linear(2, 2) for name in names})
    return nn.ModuleDict({"layers": nn.ModuleList([parts])})


@pytest.mark.parametrize("target", ["accelerate", "deepspeed"])
def test_adapters_of_the_plan_are_what_its_program_trains(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = ["training.lora_rank=8", "training.lora_targets=[linear_qkv,linear_fc2]", "space.pp=1"]
    problem = load_problem([*LLAMA, *job])
    plan = plan_of(problem, LayerStrategy(1, 8, 2), 2)
    *_, text = export_plan(problem, plan, target).files.values()
    model = block("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj")
    asked = loaded_by(text, model, monkeypatch)
    assert asked["dtype"] == torch.bfloat16
    assert asked["adapters"]["r"] == 8
    chosen = [name.split(".")[-1] for name in asked["adapters"]["target_modules"]]
    assert chosen == ["q_proj", "k_proj", "v_proj", "down_proj"]
    with pytest.raises(ValueError, match="no module of the model is a linear_fc2"):
        loaded_by(text, block("q_proj"), monkeypatch)


@pytest.mark.parametrize("target", ["accelerate", "deepspeed"])
def test_without_adapters_the_program_trains_all_weights(
    target: str, monkeypatch: pytest.MonkeyPatch, llama: Problem
) -> None:
    plan = plan_of(llama, LayerStrategy(1, 8, 2), 2)
    *_, text = export_plan(llama, plan, target).files.values()
    asked = loaded_by(text, block("q_proj"), monkeypatch)
    # DeepSpeed keeps master weights of its own
    weights = torch.float32 if target == "accelerate" else torch.bfloat16
    assert asked == {"dtype": weights, "attn_implementation": "sdpa"}


def test_adapters_that_tensor_parallelism_would_not_divide_are_refused() -> None:
    problem = load_problem([*LLAMA, "training.lora_rank=8", "space.pp=1"])
    plan = plan_of(problem, LayerStrategy(2, 4, 2), 2)
    for target in ("accelerate", "deepspeed"):
        with pytest.raises(UnsupportedError, match=r"tp=2 with lora_rank=8.*space.tp=1"):
            export_plan(problem, plan, target)


# torchtitan


def applied(text: str, layers: int, **training: int) -> SimpleNamespace:
    """The configuration that the exported function makes of an empty one of that depth."""
    compile(text, "torchtitan_plan.py", "exec")
    tree = ast.parse(text)
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    (function,) = tree.body
    assert isinstance(function, ast.FunctionDef)
    function.returns, function.args.args[0].annotation = None, None
    scope: dict[str, Any] = {"FullAC": SimpleNamespace(Config=lambda: "full")}
    scope["ChunkedLossWrapper"] = SimpleNamespace(Config=lambda loss_fn: ("chunked", loss_fn))
    exec(compile(tree, "plan", "exec"), scope)
    model = SimpleNamespace(model=SimpleNamespace(layers=[None] * layers))
    own = {
        "parallelism": SimpleNamespace(),
        "training": SimpleNamespace(**training),
        "model_spec": model,
        "compile": SimpleNamespace(),
        "optimizer": SimpleNamespace(),
        "loss": "cross entropy",
    }
    return cast(SimpleNamespace, scope["apply_plan"](SimpleNamespace(**own)))


@pytest.mark.parametrize("name", [name for name, target in NAMES if target == "torchtitan"])
def test_the_torchtitan_function_sets_what_the_plan_says(name: str) -> None:
    problem, plan = CASES[name].build()
    text, blocks = (
        files_of(name, "torchtitan")["torchtitan_plan.py"],
        problem.config.model.num_layers,
    )
    with pytest.raises(ValueError, match="but the plan has"):
        applied(text, blocks - 1)
    release = applied(text, blocks)
    local = release.training.local_batch_size // (plan.num_micro_batches if plan.pp > 1 else 1)
    assert local * plan.num_micro_batches * plan.layers[0].dp == release.training.global_batch_size
    config = applied(text, blocks, num_tokens_per_train_step=0)
    p, training, strategy = config.parallelism, config.training, plan.layers[0]
    degrees = (
        p.data_parallel_replicate_degree,
        p.data_parallel_shard_degree,
        p.tensor_parallel_degree,
        p.context_parallel_degree,
        p.pipeline_parallel_degree,
    )
    assert prod(degrees) == problem.cluster.num_devices
    assert (p.data_parallel_shard_degree > 1) == (strategy.zero_stage > 0)
    assert config.activation_checkpoint == ("full" if strategy.recompute == "full" else None)
    per_step = training.num_tokens_per_microbatch_per_dp_rank * strategy.dp * plan.num_micro_batches
    assert per_step == training.num_tokens_per_train_step == problem.tokens_per_iteration
    assert training.disable_cuda_graphs
    if plan.pp == 1:
        assert not hasattr(p, "module_fqns_per_model_part")
        return
    words = {"embedding": ["tok_embeddings"], "head": ["norm", "lm_head"], "loss": []}
    names = [layer.name for layer in problem.model.layers]
    expected = [
        [word for name in names[first:end] for word in words.get(name, [name])]
        for first, end in pairwise(plan.boundaries)
    ]
    assert p.module_fqns_per_model_part == expected
    assert len(expected) == p.pipeline_parallel_degree * plan.virtual_stages
    assert p.num_pp_microbatches == plan.num_micro_batches
    assert release.parallelism.pipeline_parallel_microbatch_size == local
    assert training.disable_cuda_graphs


# DeepSpeed, accelerate, nanotron, Galvatron


@pytest.mark.parametrize("name", [name for name, target in NAMES if target == "deepspeed"])
def test_deepspeed_batches_multiply_and_its_stages_are_the_plans(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem, plan = CASES[name].build()
    files = files_of(name, "deepspeed")
    values = json.loads(files["deepspeed.json"])
    strategy = plan.layers[0]
    product = (
        values["train_micro_batch_size_per_gpu"]
        * values["gradient_accumulation_steps"]
        * strategy.dp
    )
    assert product == problem.training.global_batch_size
    assert values.get("train_batch_size") == (None if strategy.tp > 1 else product)
    assert ("data_types" in values) == (strategy.zero_stage > 0)
    assert values["zero_optimization"]["stage"] == strategy.zero_stage
    assert values.get("tensor_parallel", {"autotp_size": 1})["autotp_size"] == strategy.tp
    assert values["bf16"] == {"enabled": True}
    assert ("deepspeed_pipeline.py" in files) == (plan.pp > 1)
    if plan.pp == 1:
        return

    class PipelineModule:
        def __init__(self, layers: list[Any], num_stages: int, **settings: Any) -> None:
            self.layers, self.num_stages, self.settings = layers, num_stages, settings
            self._topo = SimpleNamespace(get_coord=lambda rank: SimpleNamespace(pipe=rank))
            self.global_rank, self.bounds = 0, (0, 0)

        def _set_bounds(self, start: int, stop: int) -> None:
            self.bounds = (start, stop)

    fake = ModuleType("deepspeed.pipe")
    fake.PipelineModule = PipelineModule  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "deepspeed", ModuleType("deepspeed"))
    monkeypatch.setitem(sys.modules, "deepspeed.pipe", fake)
    scope: dict[str, Any] = {}
    exec(compile(files["deepspeed_pipeline.py"], "deepspeed_pipeline.py", "exec"), scope)
    names = [layer.name for layer in problem.model.layers if layer.kind != "loss"]
    module = scope["planned_pipeline"](names, None, "Block")
    assert module.num_stages == plan.pp
    for stage, (first, end) in enumerate(pairwise(plan.boundaries)):
        module.global_rank = stage
        module._partition_layers()
        held = [layer.name for layer in problem.model.layers[first:end] if layer.kind != "loss"]
        assert names[slice(*module.bounds)] == held
    with pytest.raises(ValueError, match="the plan has"):
        scope["planned_pipeline"](names[1:], None, "Block")


def test_nanotron_cuts_llama3_8b_as_its_author_prints_it() -> None:
    # T. Hidalgo, "4D parallelism with nanotron": Llama3-8B on 8 stages, printed stage by stage
    config = load_problem(["model=llama3_8b", "training=llama3_8b"]).config.model
    cuts = own_cuts(config, 8)
    blocks = [end - first for first, end in pairwise((1, *cuts, 33))]
    assert blocks[:1] + blocks[3:] == [5, 5, 4, 4, 4, 2]


def test_stages_that_are_not_nanotrons_own_are_refused(llama: Problem) -> None:
    plan = replace(CASES["sequence_parallel"].build()[1], boundaries=(0, 4, llama.num_layers))
    with pytest.raises(UnsupportedError, match=r"layers \[4\], .* itself begins them at \[6\]"):
        export_plan(llama, plan, "nanotron")


def test_nanotrons_1f1b_wants_pp_minus_1_micro_batches() -> None:
    """huggingface/nanotron#347, and case 14: batch_accumulation_per_replica is at least pp - 1."""
    problem = load_problem(["model=llama3_8b", "cluster=h100_1x8"])
    cuts = own_cuts(problem.config.model, 4)
    layers = (LayerStrategy(1, 2),) * problem.num_layers
    for count, runs in ((2, False), (4, True)):
        plan = Plan(count, (0, *cuts, problem.num_layers), layers)
        why = own_stage_refusal(problem.config.model, plan)
        assert bool(why) is not runs
        assert runs or "2 micro-batches, and its 1F1B wants at least pp - 1 = 3" in why


def test_four_bit_gradients_of_zero_3_are_deepspeeds_own_switch() -> None:
    problem = load_problem(TOY)
    for bits, expected in ((4, True), (16, None)):
        plan = plan_of(problem, LayerStrategy(1, 8, 3, grad_comm_bits=bits), 1)
        settings = json.loads(export_plan(problem, plan, "deepspeed").files["deepspeed.json"])
        assert settings["zero_optimization"].get("zero_quantized_gradients") is expected
    for zero, bits in ((1, 4), (3, 2)):
        plan = plan_of(problem, LayerStrategy(1, 8, zero, grad_comm_bits=bits), 1)
        with pytest.raises(UnsupportedError, match=r"grad_comm_bits=.*no such quantized.*closest"):
            export_plan(problem, plan, "deepspeed")


@pytest.mark.parametrize("seed", range(20))
def test_a_galvatron_file_reads_back_as_the_layer_wise_plan(seed: int, llama: Problem) -> None:
    rng = random.Random(seed)
    default = rng.choice([0, 2])

    def draw() -> LayerStrategy:
        tp = rng.choice([1, 2])
        return LayerStrategy(tp, 4 // tp, rng.choice([default, 3]), rng.choice(["none", "full"]))

    outer = draw()
    blocks = [draw() for _ in range(8)]
    cut = rng.randint(2, 8)
    plan = Plan(4, (0, cut, llama.num_layers), (outer, *blocks, outer, outer))
    values = json.loads(export_plan(llama, plan, "galvatron").files["galvatron.json"])

    def numbers(key: str) -> list[int]:
        return [int(x) for x in values[key].split(",")]

    kinds = {"ddp": 0, "zero2": 2}
    usual, columns = (
        kinds[values["default_dp_type"]],
        ("tp_sizes_enc", "dp_types_enc", "checkpoint"),
    )
    back = [
        LayerStrategy(tp, 4 // tp, 3 if sharded else usual, ("none", "full")[again])
        for tp, sharded, again in zip(*map(numbers, columns), strict=True)
    ]
    assert back == blocks
    assert numbers("pp_division") == [cut - 1, 9 - cut]
    assert (values["pp_deg"], values["chunks"], values["global_bsz"], values["vtp"]) == (
        2,
        4,
        16,
        outer.tp,
    )
    assert (values["vcp"], "embed_sdp" in values) == (1, False)
    assert values["vocab_sdp"] == (outer.zero_stage == 3)
