"""What the cost model says of a plan that trains in float32."""

from dataclasses import replace

import torch

from darts_parallel.memory import StateBytes, parameters_per_rank, state_bytes, static_bytes
from darts_parallel.problem import Problem
from darts_parallel.run.chunks import head_index, share_one_table, table_rows
from darts_parallel.run.meshes import shard_ranks
from darts_parallel.strategy import Plan


def predicted_bytes(problem: Problem, plan: Plan, stage: int) -> tuple[float, float, float]:
    """Bytes of parameters, gradients and optimizer state on a rank of `stage`, in float32 training."""
    state = state_bytes("fp32", problem.training.optimizer)
    parts = (
        StateBytes(state.parameter, 0, 0),
        StateBytes(0, state.gradient, 0),
        StateBytes(0, 0, state.optimizer),
    )
    sums = [0.0, 0.0, 0.0]
    for index, spec in enumerate(problem.model.layers):
        if plan.stage_of_layer[index] != stage:
            continue
        if index == head_index(problem) and share_one_table(problem, plan):
            spec = replace(spec, vocabulary_parameters=0)
        strategy = plan.layers[index]
        parameters = parameters_per_rank(spec, problem.model.config.vocab_size, _scalar(strategy.tp))
        shards, zero = _scalar(shard_ranks(strategy)), _scalar(strategy.zero_stage)
        for kind, part in enumerate(parts):
            sums[kind] += float(static_bytes(parameters, shards, zero, part))
    return sums[0], sums[1], sums[2]


def padded_bias_bytes(problem: Problem, plan: Plan, stage: int) -> float:
    """Bytes of an output bias beyond the vocabulary, which is padded here as its table is."""
    head = plan.layers[head_index(problem)]
    config = problem.model.config
    if not config.output_bias or plan.stage_of_layer[head_index(problem)] != stage:
        return 0.0
    return 4.0 * (table_rows(config.vocab_size, head.tp) - config.vocab_size) / head.tp


def _scalar(value: int) -> torch.Tensor:
    return torch.tensor(float(value), dtype=torch.float64)
