"""Stages that a trainer cuts itself (`own_stages` of `conf/trainer/`).

nanotron fills a stage until the cumulative cost of its blocks passes the stage's share: build_model
in its models, with the costs of its Llama.
"""

from darts_parallel.config import ModelConfig
from darts_parallel.plans.strategy import Plan


def own_cuts(config: ModelConfig, pp: int) -> tuple[int, ...]:
    """Return the first layers of all stages but the first; empty where a stage would lack blocks."""
    heads = config.num_heads * config.head_size
    block = 4 * heads + 3 * config.mlp_width
    # embedding, blocks, final norm, head: the rest costs nothing and follows the head
    costs = [0, *[block] * config.num_layers, 0, config.vocab_size]
    passed = 0
    cuts: list[int] = []
    for index, cost in enumerate(costs):
        passed += cost
        if passed > sum(costs) * ((len(cuts) + 1) / pp) and len(cuts) < pp - 1:
            cuts.append(index + 1)
    whole = len(cuts) == pp - 1 and max(cuts, default=0) <= config.num_layers
    return tuple(cuts) if whole else ()


def own_stage_refusal(config: ModelConfig, plan: Plan) -> str:
    """Say in a clause why a trainer that cuts pipelines itself runs no such plan; else empty.

    nanotron's 1F1B asserts at least pp - 1 micro-batches.
    """
    count = plan.num_micro_batches
    if count < plan.pp - 1:
        wanted = f"{plan.pp - 1} (tokens.batch_accumulation_per_replica)"
        return f"{count} micro-batches, and its 1F1B wants at least pp - 1 = {wanted}"
    planned = plan.boundaries[1:-1]
    own = own_cuts(config, plan.pp)
    if planned == own:
        return ""
    return f"stages that begin at layers {list(planned)}, and nanotron itself begins them at {list(own)}"
