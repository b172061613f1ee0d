"""Read scripts as Megatron-LM does, and build their models on the meta device, a rank of every stage."""

import contextlib
import copy
import importlib
import io
import json
import os
import sys
import traceback
import typing
from typing import Any

import torch
import typing_extensions
from torch import distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from darts_parallel.errors import Entries

if not hasattr(typing, "override"):  # Megatron-LM's main is written for Python 3.12
    typing.override = typing_extensions.override
# it asks the GPU, which is not here
torch.cuda.get_device_capability = lambda device=None: (9, 0)
torch.cuda.current_device = lambda: torch.device("meta")
from gpt_builders import gpt_builder
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models import backends
from megatron.core.models.common.embeddings import rotary_pos_embedding, yarn_rotary_pos_embedding
from megatron.core.transformer import multi_token_prediction, torch_norm, transformer_config
from megatron.training import arguments, global_vars

arguments.get_device_arch_version = lambda: 9
# packing asks for TransformerEngine 2.9, which is not here
transformer_config.is_te_min_version = lambda *words, **more: True
ONLY_READ = sys.argv[1:] == ["read"]
"""Whether no model is built."""
LOCAL = (
    "--transformer-impl",
    "local",
    "--no-persist-layer-norm",
    "--no-gradient-accumulation-fusion",
)
"""Words for a machine without TransformerEngine and Apex."""


class CoreAttention(backends.DotProductAttention):
    """Take what TransformerEngine's attention takes: a divided sequence, heads of two widths."""

    def __init__(self, config: Any, *words: Any, **more: Any) -> None:
        config = copy.copy(config)
        config.context_parallel_size = 1
        super().__init__(
            config, *words, **{k: v for k, v in more.items() if not k.endswith("_channels")}
        )


torch_norm.WrappedTorchNorm.__new__ = lambda cls, config, hidden_size, **more: (
    (  # as Apex makes them
        torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
    )(hidden_size)
)
backends.DotProductAttention = CoreAttention
multi_token_prediction.is_inference_column_parallel_linear = lambda module: False
torch.cuda.Stream = type("Stream", (), {})
for module in (rotary_pos_embedding, yarn_rotary_pos_embedding):  # it would pin memory
    module.get_pos_emb_on_this_cp_rank = lambda positions, *words: positions


def read(
    words: list[str],
    world: int,
    one_queue: bool,
) -> Any:
    """Return the arguments as the program checks them."""
    os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    if one_queue:  # as the script exports it
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    sys.argv = ["pretrain_gpt.py", *words]
    args = arguments.parse_args()  # ends at a flag that it does not know
    args.rank = 0
    args.world_size = world
    arguments.validate_args(args, {})
    args.apply_rope_fusion = False
    arguments.core_transformer_config_from_args(args)
    return args


def degree(
    args: Any,
    name: str,
    parameter: Any,
) -> int:
    """Return the parts of a parameter."""
    if ".experts." in name:
        return args.expert_model_parallel_size * args.expert_tensor_parallel_size
    return (
        args.tensor_model_parallel_size if getattr(parameter, "tensor_model_parallel", False) else 1
    )


def t5_program() -> Any:
    """Return the program of T5, which older versions keep elsewhere."""
    return importlib.import_module("examples.t5.pretrain_t5")


def chunks_of(args: Any, rank: int) -> list[dict[str, int]]:
    """Build what one rank holds: layers, parameters in whole and here, of every chunk."""
    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=args.world_size)
    virtual = args.virtual_pipeline_model_parallel_size
    parallel_state.initialize_model_parallel(
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        virtual,
        context_parallel_size=args.context_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
        create_gloo_process_groups=False,
    )
    tensor_parallel.random.get_cuda_rng_tracker().fork = lambda *words, **more: (
        contextlib.nullcontext()
    )
    config = arguments.core_transformer_config_from_args(args)
    config.use_cpu_initialization = True
    config.perform_initialization = False
    config.init_model_with_meta_device = True
    found = []
    for chunk in range(virtual or 1):
        vp = chunk if virtual else None
        first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp)
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp)
        with torch.device("meta"):
            if args.decoder_num_layers is None:
                model = gpt_builder(args, first, last, vp_stage=vp, config=config)
            else:
                model = t5_program().model_provider(first, last, config=config)
        here = whole = 0
        for name, parameter in model.named_parameters():
            if "word_embeddings" not in name and "output_layer" not in name:
                here += parameter.numel()
                whole += parameter.numel() * degree(args, name, parameter)
        mtp = getattr(model, "mtp", None)
        encoder = getattr(model, "encoder", None)
        blocks = [*getattr(encoder, "layers", ()), *model.decoder.layers]
        sizes = {"layers": len(blocks), "embedding": first, "head": last}
        sizes["mtp"] = len(getattr(mtp, "layers", ()))
        found.append(sizes | {"whole": whole, "here": here})
    return found


def built(
    words: list[str],
    world: int,
    one_queue: bool,
    names: list[str],
) -> Entries:
    """Return what is read and built, or why not."""
    found: Entries = {}
    try:
        args = read(words, world, one_queue)
        found |= {name: getattr(args, name, None) for name in names}
        if ONLY_READ:  # before fields that only some versions have
            return found
        if args.hybrid_layer_pattern:  # its layers want TransformerEngine and mamba_ssm
            return found
        args = read([*words, *LOCAL], world, one_queue)
        args.padded_vocab_size = args.vocab_size
        global_vars._GLOBAL_ARGS = args
        pp = args.pipeline_model_parallel_size
        stages = [chunks_of(args, stage * world // pp) for stage in range(pp)]
        found["chunks"] = [chunk for row in zip(*stages, strict=True) for chunk in row]
    except (Exception, SystemExit) as error:
        found["error"] = f"{type(error).__name__}: {error} {traceback.format_exc()[-900:]}"
    return found


if __name__ == "__main__":
    names, scripts = json.load(sys.stdin)
    os.environ |= {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}
    for script in scripts:
        with contextlib.redirect_stdout(io.StringIO()):
            answer = built(*script, names=names)
        print("READ", json.dumps(answer), flush=True)
