"""Train by a plan with PyTorch alone: device mesh, parallel modules, sharding and pipeline schedule.

Run on every node, with data of your own in `batch`:
    torchrun --nnodes NODES --nproc-per-node GPUS FILE [--steps 10]
It takes nccl where every process has a GPU, else gloo on the CPU.
"""

# toy on toy, 8 GPUs; written by darts-parallel
# dp 8 · tp 1 · pp 1 · micro-batch 1 × 2 · ZeRO-0

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.pipelining._backward import stage_backward
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional

PLAN: dict[str, Any] = {'pp': 1,
 'dp': 8,
 'tp': 1,
 'sequence_parallel': False,
 'zero_stage': 0,
 'num_micro_batches': 2,
 'parts': [[0, 6]],
 'recomputed': [],
 'global_batch_size': 16,
 'seq_len': 64,
 'precision': 'bf16',
 'optimizer': 'adam',
 'model': {'num_layers': 4,
           'hidden_size': 64,
           'num_heads': 4,
           'num_kv_heads': 4,
           'head_dim': 16,
           'ffn_hidden_size': 256,
           'gated_mlp': False,
           'vocab_size': 256,
           'max_seq_len': 64,
           'learned_positions': True,
           'rotary_base': 10000.0,
           'causal': True,
           'linear_bias': True,
           'qkv_bias': True,
           'norm_bias': True,
           'tie_embeddings': True}}
"""The plan and the sizes of the model; `parts` are the layers of every pipeline chunk."""
