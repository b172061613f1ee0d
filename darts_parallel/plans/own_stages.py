"""Stages that a trainer cuts itself (`own_stages` of `conf/trainer/`).

nanotron fills a stage until the cumulative cost of its blocks passes the stage's share: build_model
in its models, with the costs of its Llama.
"""

from itertools import accumulate

from darts_parallel.config import ModelConfig
from darts_parallel.plans.strategy import Plan
from darts_parallel.problem import Model


def balanced_stages(config: ModelConfig, pp: int) -> list[int]:
    """Count the blocks of each stage as nanotron cuts them; -1: the head is on an earlier stage."""
    heads = config.num_heads * (config.head_dim or config.hidden_size // config.num_heads)
    ffn = config.ffn_hidden_size or 4 * config.hidden_size
    block = 4 * heads * config.hidden_size + 3 * ffn * config.hidden_size
    head = config.vocab_size * config.hidden_size
    # embedding, blocks, final norm, head: the rest costs nothing and follows the head
    costs = [0, *[block] * config.num_layers, 0, head]
    total = sum(costs)
    passed = 0
    stage = 0
    counts = [0] * pp
    for index, cost in enumerate(costs):
        if index == len(costs) - 1 and stage != pp - 1:
            return [-1] * pp
        counts[stage] += 1 <= index <= config.num_layers
        passed += cost
        if passed > total * ((stage + 1) / pp) and stage < pp - 1:
            stage += 1
    return counts


def own_cuts(model: Model, pp: int) -> tuple[int, ...]:
    """Return the first layers of all stages but the first; empty where a stage would lack blocks."""
    blocks = balanced_stages(model.config, pp)
    firsts = {f"layers.{number}" for number in accumulate(blocks[:-1])}
    cuts = tuple(i for i, layer in enumerate(model.layers) if layer.name in firsts)
    return cuts if len(cuts) == pp - 1 else ()


def own_stage_refusal(model: Model, plan: Plan) -> str:
    """Say in a clause why a trainer that cuts pipelines itself runs no such plan; else empty.

    nanotron's 1F1B asserts at least pp - 1 micro-batches.
    """
    count = plan.num_micro_batches
    if count < plan.pp - 1:
        wanted = f"{plan.pp - 1} (tokens.batch_accumulation_per_replica)"
        return f"{count} micro-batches, and its 1F1B wants at least pp - 1 = {wanted}"
    planned, own = plan.boundaries[1:-1], own_cuts(model, plan.pp)
    if planned == own:
        return ""
    return f"stages that begin at layers {list(planned)}, and nanotron itself begins them at {list(own)}"
