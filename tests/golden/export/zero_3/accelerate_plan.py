"""accelerate objects of a plan."""

# toy_llama on toy, 8 GPUs; written by darts-parallel
# dp 4 · tp 2 · pp 1 · micro-batch 2 × 2 · ZeRO-3 · recompute full

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import GradientAccumulationPlugin
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import AutoModelForCausalLM
from transformers.integrations import tensor_parallel

MICRO_BATCH_SIZE = 2
"""Sequences of one batch of the data loader, per process."""


def planned_accelerator() -> Accelerator:
    """The accelerator; start its program by `accelerate launch --config_file accelerate.yaml`."""
    accelerator = Accelerator(
        # the gradients of every micro-batch are reduced and sharded: whole ones would not fit
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=2, sync_each_batch=True
        ),
        parallelism_config=ParallelismConfig(dp_replicate_size=1, dp_shard_size=4, tp_size=2, cp_size=1),
    )
    # the policy of accelerate itself sums gradients in 16 bits
    accelerator.state.fsdp_plugin.mixed_precision_policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.bfloat16
    )
    return accelerator


def planned_model(accelerator: Any, name: str) -> Any:
    """Load the model as the plan prices it."""
    if not hasattr(tensor_parallel, "ReplicateParallel"):
        raise ImportError("tensor parallelism beside FSDP wants transformers==5.0.0")
    model = AutoModelForCausalLM.from_pretrained(
        name, dtype=torch.float32, attn_implementation="sdpa", tp_plan="auto", device_mesh=accelerator.torch_device_mesh
    )
    model.config.use_cache = False  # recomputed layers would find their keys in it already
    return model


def planned_optimizer(model: Any, **settings: Any) -> Any:
    """Make the optimizer whose state the plan prices; rates and decay are yours."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, **settings)
