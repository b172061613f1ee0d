"""accelerate objects of a plan."""

# toy_llama on toy, 8 GPUs; written by darts-parallel
# dp 2 · tp 1 · cp 4 · pp 1 · micro-batch 2 × 4 · ZeRO-3

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import GradientAccumulationPlugin
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import AutoModelForCausalLM

MICRO_BATCH_SIZE = 2
"""Sequences of one batch of the data loader, per process."""
CONTEXT_PARALLEL = 4


def planned_accelerator() -> Accelerator:
    """The accelerator; start its program by `accelerate launch --config_file accelerate.yaml`."""
    accelerator = Accelerator(
        # the gradients of every micro-batch are reduced and sharded: whole ones would not fit
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=4, sync_each_batch=True
        ),
        parallelism_config=ParallelismConfig(dp_replicate_size=1, dp_shard_size=2, tp_size=1, cp_size=4),
    )
    # the policy of accelerate itself sums gradients in 16 bits
    accelerator.state.fsdp_plugin.mixed_precision_policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.bfloat16
    )
    return accelerator


def planned_model(accelerator: Any, name: str) -> Any:
    """Load the model as the plan prices it."""
    model = AutoModelForCausalLM.from_pretrained(
        name, dtype=torch.float32, attn_implementation="sdpa"
    )
    return model


def planned_optimizer(model: Any, **settings: Any) -> Any:
    """Make the optimizer whose state the plan prices; rates and decay are yours."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, **settings)


def planned_step(accelerator: Accelerator, model: Any, batch: dict[str, Any]) -> Any:
    """Loss of a micro-batch whose sequences are divided; outside of this context they would not be."""
    model.set_attn_implementation("sdpa")  # eager attention stays inside each part, in silence
    batch = {key: tensor for key, tensor in batch.items() if key != "attention_mask"}
    labels = torch.nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:].contiguous()
    positions = torch.arange(labels.shape[1], device=labels.device).repeat(labels.shape[0], 1)
    # a part knows neither its place in the sequence nor the token that follows it, nor all tokens
    batch |= {"shift_labels": labels, "position_ids": positions}
    count = (labels != -100).sum() / CONTEXT_PARALLEL
    buffers = list(batch.values())
    with accelerator.maybe_context_parallel(
        buffers=buffers, buffer_seq_dims=[1] * len(buffers), no_restore_buffers=set(buffers)
    ):
        return model(**batch, num_items_in_batch=count).loss
