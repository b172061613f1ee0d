"""Experts and multi-head latent attention in Megatron-LM's flags."""

from itertools import groupby
from typing import Any

from darts_parallel.config import ModelConfig, as_yaml, expert_pattern, score_function
from darts_parallel.export.common import Flags, Request, switches

MOST_RUNS = 4
"""Runs of equal layers up to which a pattern is written run by run."""


def megatron_model_flags(job: Request) -> Flags:
    """Return sizes of experts and of multi-head latent attention, and how tokens reach the experts.

    Errors:
        UnsupportedError: a router's bias apart from those of the products.
    """
    return _latent_flags(job.model) + _expert_flags(job)


def _latent_flags(config: ModelConfig) -> Flags:
    if not config.multi_latent_attention:
        return []
    names = {
        "q-lora-rank": config.q_lora_rank,
        "kv-lora-rank": config.kv_lora_rank,
        "qk-head-dim": config.qk_nope_head_dim,
        "qk-pos-emb-head-dim": config.qk_rope_head_dim,
        "v-head-dim": config.v_head_dim,
    }
    given = [(k, v) for k, v in names.items() if v is not None]
    # its norms stand behind the low ranks there, as in DeepSeek-V2
    return [("multi-latent-attention", None), ("qk-layernorm", None), *given]


def _expert_flags(job: Request) -> Flags:
    config = job.model
    training = job.training
    if config.num_experts is None:
        return []
    if config.moe_router_bias != config.linear_bias:
        raise job.refuse(
            f"model={config.name} has moe_router_bias={as_yaml(config.moe_router_bias)} with "
            f"linear_bias={as_yaml(config.linear_bias)}, and its router has a bias where products have",
            "equal values of both",
        )
    values = _expert_values(config, training.moe_token_dispatcher_type)
    flags = [(name, value) for name, value in values.items() if value is not None]
    if training.moe_token_dispatcher_type == "flex":
        wide = any(group.domain_nodes > 1 for group in job.problem.cluster.groups)
        flags.append(("moe-flex-dispatcher-backend", "hybridep" if wide else "deepep"))
    padded = config.moe_expert_capacity_factor is not None
    wanted = {
        "moe-grouped-gemm": True,
        "moe-router-pre-softmax": config.moe_router_pre_softmax,
        "moe-router-enable-expert-bias": config.moe_router_enable_expert_bias,
        "moe-pad-expert-input-to-capacity": padded,
        "moe-shared-expert-gate": config.moe_shared_expert_gate,
        "moe-shared-expert-overlap": training.moe_shared_expert_overlap,
        "overlap-moe-expert-parallel-comm": training.overlap_moe_expert_parallel_comm,
    }
    return flags + switches(wanted)


def _expert_values(config: ModelConfig, dispatcher: str) -> dict[str, Any]:
    """Return flags with values, of which None is not written."""
    width = config.moe_ffn_hidden_size or config.mlp_width
    frequency = layer_frequency(config)
    sizes = {
        "num-experts": config.num_experts,
        "moe-router-topk": config.moe_router_topk,
        "moe-ffn-hidden-size": width,
        "moe-layer-freq": frequency,
        "moe-shared-expert-intermediate-size": config.moe_shared_expert_intermediate_size,
    }
    routing = {
        "moe-router-num-groups": config.moe_router_num_groups,
        "moe-router-group-topk": config.moe_router_group_topk,
        "moe-expert-capacity-factor": config.moe_expert_capacity_factor,
        "moe-token-dispatcher-type": dispatcher,
    }
    return sizes | _score_flags(config, dispatcher) | routing


def _score_flags(config: ModelConfig, dispatcher: str) -> dict[str, Any]:
    """Return how the router scores experts; sigmoids and the flex dispatcher want fp32."""
    function = score_function(config)
    return {
        "moe-router-score-function": None if function == "softmax" else function,  # its default
        "moe-router-topk-scaling-factor": config.moe_router_topk_scaling_factor,
        "moe-router-dtype": "fp32" if function == "sigmoid" or dispatcher == "flex" else None,
    }


def layer_frequency(config: ModelConfig) -> str | int:
    """Say which layers have experts: 1 for all, or runs of a Python list."""
    pattern = [int(has) for has in expert_pattern(config)]
    if all(pattern):
        return 1
    runs = [(has, len(list(equal))) for has, equal in groupby(pattern)]
    period = _period(pattern)
    if len(runs) > MOST_RUNS and period < len(pattern):
        text = f"({pattern[:period]}*{len(pattern) // period})"
        return text.replace(" ", "")
    return "(" + "+".join(f"[{has}]*{count}" for has, count in runs) + ")"


def _period(pattern: list[int]) -> int:
    """Return the length of the shortest pattern whose repetition is the whole."""
    length = len(pattern)
    sizes = [n for n in range(1, length + 1) if length % n == 0]
    return next(n for n in sizes if pattern[:n] * (length // n) == pattern)


def megatron_recompute_modules(job: Request) -> Flags:
    """Name the parts that selective recomputation repeats, other than the attention core."""
    modules = job.training.recompute_modules
    if list(modules) == ["core_attn"] or all(s.recompute != "selective" for s in job.blocks):
        return []
    return [("recompute-modules", " ".join(modules))]
