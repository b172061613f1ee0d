import os
import re
import shlex
from typing import Any

import golden
import pytest

from darts_parallel.config import expert_pattern, score_function

MEGATRON = os.environ.get("MEGATRON") or None
"""A folder of Megatron-LM, whose arguments are no part of the package megatron-core."""

PARSE = """
import json, os, sys, traceback, typing, typing_extensions
if not hasattr(typing, "override"):  # Megatron-LM's main is written for Python 3.12
    typing.override = typing_extensions.override
import torch
torch.cuda.get_device_capability = lambda device=None: (9, 0)  # it asks the GPU, which is not here
from megatron.training import arguments
from megatron.training.arguments import core_transformer_config_from_args, parse_args, validate_args
arguments.get_device_arch_version = lambda: 9
read = []
for words, world, one_queue in json.load(sys.stdin):
    os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    if one_queue:  # as the script exports it
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    sys.argv = ["pretrain_gpt.py", *words]
    args = parse_args()  # ends at a flag that it does not know
    args.rank, args.world_size = 0, world
    checked = ""
    try:
        validate_args(args, {})
        args.apply_rope_fusion = False  # wants TransformerEngine, which is not here
        core_transformer_config_from_args(args)
    except Exception as error:
        checked = f"{type(error).__name__}: {error} {traceback.format_exc()[-900:]}"
    read.append({"checked": checked, **{name: getattr(args, name, None) for name in NAMES}})
print("READ", json.dumps(read))
"""
"""Program of a separate process: the checkout brings its own megatron.core. All scripts are read in one."""
NAMES = (
    "pipeline_model_parallel_size", "tensor_model_parallel_size", "context_parallel_size",
    "global_batch_size", "micro_batch_size", "expert_model_parallel_size", "expert_tensor_parallel_size",
    "data_parallel_size", "num_experts", "moe_router_topk", "moe_ffn_hidden_size", "moe_layer_freq",
    "multi_latent_attention", "recompute_modules", "moe_router_score_function", "qk_layernorm",
)  # fmt: skip


def flags(name: str) -> list[str]:
    """The flags of a golden script as the shell hands them over."""
    lines = golden.read(name, "megatron.sh").splitlines()
    own = [line for line in lines if line.startswith("    --") and not line.endswith("\\")]  # not torchrun's
    return [word for line in own for word in shlex.split(line)]


@pytest.mark.parametrize("name", golden.cases("megatron"))
def test_the_layout_of_the_stages_is_read_as_the_plan_cuts_them(name: str) -> None:
    layouts = pytest.importorskip("megatron.core.transformer.pipeline_parallel_layer_layout")
    _, plan = golden.built(name)
    given = flags(name)
    if "--pipeline-model-parallel-layout" not in given:
        return
    text = given[given.index("--pipeline-model-parallel-layout") + 1]
    read = layouts.PipelineParallelLayerLayout.from_str(text, plan.pp)
    chunks = [stage[chunk] for chunk in range(plan.virtual_stages) for stage in read.layout]
    blocks = [sum(1 for kind in chunk if "decoder" in str(kind).lower()) for chunk in chunks]
    written = [sum(int(n or 1) for n in re.findall(r"t(?:\*(\d+))?", part)) for part in text.split("|")]
    assert blocks == written
    assert len(read.layout) == plan.pp


@pytest.fixture(scope="module")
def read() -> dict[str, dict[str, Any]]:
    """Return what Megatron-LM reads of every golden script."""
    if MEGATRON is None:
        pytest.skip("MEGATRON=FOLDER names a checkout of Megatron-LM")
    names = golden.cases("megatron")
    worlds = [golden.built(name)[0].cluster.num_devices for name in names]
    queues = ["export CUDA_DEVICE_MAX_CONNECTIONS=1" in golden.read(name, "megatron.sh") for name in names]
    rows = [*zip(map(flags, names), worlds, queues, strict=True)]
    (found,) = golden.answers(["-c", f"NAMES = {NAMES!r}\n{PARSE}"], rows, MEGATRON)
    return dict(zip(names, found, strict=True))


@pytest.mark.parametrize("name", golden.cases("megatron"))
def test_megatron_reads_the_plan_and_accepts_it(name: str, read: dict[str, dict[str, Any]]) -> None:
    problem, plan = golden.built(name)
    found, strategy, model = read[name], plan.layers[1], problem.config.model
    assert found["checked"] == ""
    assert found["pipeline_model_parallel_size"] == plan.pp
    assert found["tensor_model_parallel_size"] == strategy.tp
    assert found["context_parallel_size"] == plan.cp
    assert found["data_parallel_size"] == strategy.dp
    assert found["global_batch_size"] == problem.training.global_batch_size
    assert found["num_experts"] == model.num_experts
    if model.num_experts is None:
        return
    experts = next(s for s, layer in zip(plan.layers, problem.model.layers, strict=True) if layer.experts)
    assert found["expert_model_parallel_size"] == experts.ep
    assert found["expert_tensor_parallel_size"] == experts.etp
    assert found["moe_router_topk"] == model.moe_router_topk
    assert found["moe_ffn_hidden_size"] == (model.moe_ffn_hidden_size or model.ffn_hidden_size)
    assert found["multi_latent_attention"] == model.multi_latent_attention
    assert found["qk_layernorm"] == (model.multi_latent_attention or model.qk_norm)
    assert found["moe_router_score_function"] == score_function(model)
    frequency = found["moe_layer_freq"]
    blocks = range(model.num_layers)
    has = frequency if isinstance(frequency, list) else [int(i % frequency == 0) for i in blocks]
    assert [bool(entry) for entry in has] == list(expert_pattern(model))
