"""Plans and jobs that the processes of the run's tests work on."""

import os
import time

import torch

from darts_parallel.plans.strategy import LayerStrategy, Plan
from darts_parallel.problem.problem import Problem, load_problem
from darts_parallel.run._lossy import lossy_all_reduce
from darts_parallel.run._verify import StepComparison, verify
from darts_parallel.run.engine import Engine

TINY = (
    "model=toy",
    "cluster=toy",
    "training=toy",
    "training.precision=fp32",
    "training.global_batch_size=8",
    "training.seq_len=8",
    "model.num_layers=2",
    "model.hidden_size=16",
    "model.num_heads=4",
    "model.vocab_size=100",
    "model.max_seq_len=8",
)
LAYERS = 5
"""Embedding, two blocks, head, loss."""
LLAMA = (
    "model.num_kv_heads=2",
    "model.gated_mlp=true",
    "model.tie_embeddings=false",
    "model.linear_bias=false",
    "model.norm_bias=false",
    "model.learned_positions=false",
    "model.qk_norm=true",
    "model.head_dim=6",
    "model.ffn_hidden_size=24",
)
MIXTURE = (
    *LLAMA,
    "model.num_experts=4",
    "model.moe_router_topk=2",
    "model.moe_ffn_hidden_size=12",
    "model.moe_shared_expert_intermediate_size=8",
    "model.moe_shared_expert_gate=true",
    "model.first_k_dense_replace=1",
)
BERT = (
    "model.causal=false",
    "model.embedding_norm=true",
    "model.head_transform=true",
    "model.token_types=2",
    "model.output_bias=true",
    "model.final_norm=false",
    "training.attention_kernel=unfused",
)


def tiny(devices: int, *overrides: str) -> Problem:
    """A problem of one node with `devices` toy devices."""
    return load_problem(
        [*TINY, "cluster.nodes.0.count=1", f"cluster.nodes.0.gpus={devices}", *overrides]
    )


def uniform(
    boundaries: tuple[int, ...],
    num_micro_batches: int,
    strategy: LayerStrategy,
    chunks: int = 1,
    schedule: str | None = None,
) -> Plan:
    """A plan of equal layers."""
    layers = (strategy,) * boundaries[-1]
    return Plan(num_micro_batches, boundaries, layers, virtual_stages=chunks, schedule=schedule)


def verified(problem: Problem, plan: Plan, seeds: tuple[int, int]) -> StepComparison:
    """A job: the plan with weights of one seed against one process with weights of another."""
    engine = Engine(problem, plan, seeds[0], torch.device("cpu"))
    return verify(engine, seeds[1])


def gradients(problem: Problem, plan: Plan) -> dict[str, bytes]:
    """A job: every gradient of this rank's chunks after one batch."""
    engine, seed = Engine(problem, plan, 0, torch.device("cpu")), torch.Generator().manual_seed(0)
    size = (problem.training.global_batch_size, problem.training.seq_len + 1)
    engine.forward_backward(torch.randint(problem.model.config.vocab_size, size, generator=seed))
    named = [entry for chunk in engine.local.chunks.values() for entry in chunk.named_parameters()]
    return {name: p.grad.numpy().tobytes() for name, p in named if p.grad is not None}


def hang(rank: int) -> None:
    """A job in which one rank never comes to the common barrier."""
    if torch.distributed.get_rank() == rank:
        time.sleep(600)
    torch.distributed.barrier()


def die(rank: int) -> None:
    """A job in which one rank ends while the others wait for it."""
    if torch.distributed.get_rank() == rank:
        os._exit(7)
    torch.distributed.barrier()


def reduced(size: int, bits: int) -> torch.Tensor:
    """A job: the sum of random numbers, each rank's of its own seed, as an all-reduce at `bits` gives it."""
    rank = torch.distributed.get_rank()
    return lossy_all_reduce(torch.randn(size, generator=torch.Generator().manual_seed(rank)), bits)
