import os
import shlex
from itertools import pairwise
from pathlib import Path
from typing import Any

import golden
import pytest

from darts_parallel.config import DYNAMIC, PACKED
from darts_parallel.errors import Entries
from darts_parallel.export import Request, packing_flags
from darts_parallel.problem import load_problem

MEGATRON = os.environ.get("MEGATRON") or None
"""A folder of Megatron-LM, whose arguments are no part of the package megatron-core."""

NAMES = (
    "pipeline_model_parallel_size",
    "tensor_model_parallel_size",
    "context_parallel_size",
    "global_batch_size",
    "micro_batch_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "data_parallel_size",
    "num_experts",
    "moe_router_topk",
    "moe_ffn_hidden_size",
    "moe_layer_freq",
    "multi_latent_attention",
    "recompute_modules",
    "moe_router_score_function",
    "qk_layernorm",
)


def flags(name: str) -> list[str]:
    """The flags of a golden script as the shell hands them over."""
    lines = golden.read(name, "megatron.sh").splitlines()
    own = [
        line for line in lines if line.startswith("    --") and not line.endswith("\\")
    ]  # not torchrun's
    return [word for line in own for word in shlex.split(line)]


PACKING_NAMES = (
    "sequence_packing_scheduler",
    "max_seqlen_per_dp_cp_rank",
    "min_dynamic_context_parallel_size",
    "dynamic_context_parallel",
    "hybrid_context_parallel",
)
PACKED_JOB = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --bf16 "
    "--max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 16 "
    "--context-parallel-size 4 --vocab-size 1024 --tokenizer-type NullTokenizer"
)
"""A job on 16 GPUs whose sequences need four ranks of 16 tokens."""


def packing_scripts(scheduler: str) -> list[list[str]]:
    """Return the flags of a scheduler for every version."""
    pins = [
        "training.max_seqlen_per_dp_cp_rank=16",
        f"training.sequence_packing_scheduler={scheduler}",
    ]
    job = load_problem(["model=toy", "cluster=toy", "training=toy", *pins])
    versions = packing_flags(job.training, 1)
    return [PACKED_JOB.split() + flags.split() for flags in versions.values()]


def answers_of(scripts: list[list[str]]) -> list[Entries]:
    """Return what Megatron-LM reads of scripts of 16 GPUs."""
    if MEGATRON is None:
        pytest.skip("MEGATRON=FOLDER names a checkout of Megatron-LM")
    rows = [PACKING_NAMES, [(script, 16, True) for script in scripts]]
    program = str(Path(__file__).with_name("megatron_build.py"))
    return golden.answers([program, "read"], rows, MEGATRON)


def test_its_version_takes_the_flags_of_dynamic_context_parallelism() -> None:
    new, old = answers_of(packing_scripts(DYNAMIC))
    if "error" in new:
        assert new["error"].startswith("SystemExit: 2")
        assert old["hybrid_context_parallel"]
        assert old["max_seqlen_per_dp_cp_rank"] == 16
        return
    assert new["max_seqlen_per_dp_cp_rank"] == 16
    assert new["sequence_packing_scheduler"] == DYNAMIC
    assert new["dynamic_context_parallel"]
    assert new["min_dynamic_context_parallel_size"] == 1
    (packed,) = answers_of(packing_scripts(PACKED))
    assert packed["sequence_packing_scheduler"] == PACKED


Read = dict[str, dict[str, Any]]
"""Arguments that Megatron-LM reads of every plan."""


@pytest.fixture(scope="module")
def read() -> Read:
    """Return what Megatron-LM reads of every golden script."""
    if MEGATRON is None:
        pytest.skip("MEGATRON=FOLDER names a checkout of Megatron-LM")
    names = golden.cases("megatron")
    worlds = [golden.built(name)[0].cluster.num_devices for name in names]
    queues = [
        "export CUDA_DEVICE_MAX_CONNECTIONS=1" in golden.read(name, "megatron.sh") for name in names
    ]
    rows = [NAMES, [*zip(map(flags, names), worlds, queues, strict=True)]]
    program = str(Path(__file__).with_name("megatron_build.py"))
    return dict(zip(names, golden.answers([program], rows, MEGATRON), strict=True))


def mixtures() -> list[str]:
    """Name the golden plans of models with experts."""
    names = golden.cases("megatron")
    return [name for name in names if golden.built(name)[0].config.model.num_experts]


@pytest.mark.parametrize("name", golden.cases("megatron"))
def test_megatron_reads_the_plan_and_accepts_it(name: str, read: Read) -> None:
    problem, plan = golden.built(name)
    found = read[name]
    strategy = plan.layers[1]
    assert found.get("error") is None
    assert found["pipeline_model_parallel_size"] == plan.pp
    assert found["tensor_model_parallel_size"] == strategy.tp
    assert found["context_parallel_size"] == plan.cp
    assert found["data_parallel_size"] == strategy.dp
    assert found["global_batch_size"] == problem.training.global_batch_size
    assert found["num_experts"] == problem.config.model.num_experts


@pytest.mark.parametrize("name", mixtures())
def test_it_reads_the_degrees_and_sizes_of_experts(name: str, read: Read) -> None:
    problem, plan = golden.built(name)
    found = read[name]
    model = problem.config.model
    layers = zip(plan.layers, problem.model.layers, strict=True)
    experts = next(strategy for strategy, layer in layers if layer.experts)
    assert found["expert_model_parallel_size"] == experts.ep
    assert found["expert_tensor_parallel_size"] == experts.etp
    assert found["moe_ffn_hidden_size"] == (model.moe_ffn_hidden_size or model.ffn_hidden_size)
    assert found["multi_latent_attention"] == model.multi_latent_attention
    assert found["qk_layernorm"] == (model.multi_latent_attention or model.qk_norm)


@pytest.mark.parametrize("name", mixtures())
def test_it_reads_the_router_and_the_layers_with_experts(name: str, read: Read) -> None:
    found = read[name]
    model = golden.built(name)[0].config.model
    assert found["moe_router_topk"] == model.moe_router_topk
    assert found["moe_router_score_function"] == model.score_function
    frequency = found["moe_layer_freq"]
    if not isinstance(frequency, list):
        frequency = [block % frequency == 0 for block in range(model.num_layers)]
    assert [bool(entry) for entry in frequency] == list(model.expert_pattern)


@pytest.mark.parametrize("name", golden.cases("megatron"))
def test_its_model_has_the_layers_and_shards_of_the_plan(name: str, read: Read) -> None:
    problem, plan = golden.built(name)
    layers = problem.model.layers
    model = problem.config.model
    chunks = Request("megatron", problem, plan).chunks
    if model.hybrid_override_pattern is not None:  # it wants TransformerEngine and mamba_ssm
        return
    sums: list[tuple[int, ...]] = []
    for number, (first, end) in enumerate(pairwise(plan.boundaries)):
        own = read[name]["chunks"][number]
        chunk = chunks[number]
        assert (own["layers"], own["mtp"]) == (chunk.num_blocks, chunk.mtp)
        assert (own["embedding"], own["head"]) == (chunk.embedding, chunk.head)
        whole = here = 0
        for layer, strategy in zip(layers[first:end], plan.layers[first:end], strict=True):
            experts = layer.experts.parameters if layer.experts else 0
            whole += layer.sharded_parameters + layer.replicated_parameters + experts
            here += layer.sharded_parameters // strategy.tp + layer.replicated_parameters
            here += experts // (strategy.ep * strategy.etp)
        if model.multi_latent_attention and plan.layers[1].tp > 1:
            here = own["here"]  # products into low ranks are whole in TransformerEngine alone
        if model.num_encoder_layers:
            # both stacks share a table of positions, and the last norms want TransformerEngine
            shared = model.hidden_size * (model.max_seq_len + 2 * (1 + model.norm_bias))
            whole -= shared
            here -= shared
        sums.append((own["whole"], own["here"], whole, here))
    if model.mtp_num_layers:  # the last norm goes with the last block, not with the head
        sums = [tuple(map(sum, zip(*sums, strict=True)))]
    assert all(own[:2] == own[2:] for own in sums)
