"""Experts and multi-head latent attention in Megatron-LM's flags."""

from itertools import groupby

from darts_parallel.config import ModelConfig, as_yaml
from darts_parallel.export.common import Flags, Request, flags_of, switches
from darts_parallel.plans import divisors

MOST_RUNS = 4
"""Runs of equal layers up to which a pattern is written run by run."""


def latent_flags(config: ModelConfig) -> Flags:
    """Return the sizes of multi-head latent attention."""
    if not config.multi_latent_attention:
        return []
    heads: Flags = [
        ("qk-head-dim", config.qk_nope_head_dim),
        ("qk-pos-emb-head-dim", config.qk_rope_head_dim),
    ]
    ranks = flags_of(config, "multi_latent_attention q_lora_rank kv_lora_rank")
    # its norms stand behind the low ranks there, as in DeepSeek-V2
    ranks.insert(1, ("qk-layernorm", None))
    return ranks + heads + flags_of(config, "v_head_dim")


def expert_flags(job: Request) -> Flags:
    """Return the sizes of experts, and how tokens reach them.

    Errors:
        UnsupportedError: a router's bias apart from those of the products.
    """
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
    flags = _sizes_and_routing(config, training.moe_token_dispatcher_type)
    if training.moe_token_dispatcher_type == "flex":
        wide = any(group.domain_nodes > 1 for group in job.problem.cluster.groups)
        flags.append(("moe-flex-dispatcher-backend", "hybridep" if wide else "deepep"))
    padded = config.moe_expert_capacity_factor is not None
    flags.append(("moe-grouped-gemm", None))
    flags += flags_of(config, "moe_router_pre_softmax moe_router_enable_expert_bias")
    flags += switches({"moe-pad-expert-input-to-capacity": padded})
    flags += flags_of(config, "moe_shared_expert_gate")
    return flags + flags_of(training, "moe_shared_expert_overlap overlap_moe_expert_parallel_comm")


def _sizes_and_routing(config: ModelConfig, dispatcher: str) -> Flags:
    """Return flags with values; the flags of routing follow those of sizes."""
    sizes: Flags = [
        ("moe-ffn-hidden-size", config.moe_ffn_hidden_size or config.mlp_width),
        ("moe-layer-freq", layer_frequency(config)),
    ]
    routing = flags_of(
        config, "moe_router_num_groups moe_router_group_topk moe_expert_capacity_factor"
    )
    return [
        *flags_of(config, "num_experts moe_router_topk"),
        *sizes,
        *flags_of(config, "moe_shared_expert_intermediate_size"),
        *_score_flags(config, dispatcher),
        *routing,
        ("moe-token-dispatcher-type", dispatcher),
    ]


def _score_flags(config: ModelConfig, dispatcher: str) -> Flags:
    """Return how the router scores experts; sigmoids and the flex dispatcher want fp32."""
    function = config.score_function
    flags: Flags = []
    if function != "softmax":  # its default
        flags.append(("moe-router-score-function", function))
    flags += flags_of(config, "moe_router_topk_scaling_factor")
    if function == "sigmoid" or dispatcher == "flex":
        flags.append(("moe-router-dtype", "fp32"))
    return flags


def layer_frequency(config: ModelConfig) -> str | int:
    """Say which layers have experts: 1 for all, or runs of a Python list."""
    pattern = list(map(int, config.expert_pattern))
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
    return next(n for n in divisors(length) if pattern[:n] * (length // n) == pattern)


def megatron_recompute_modules(job: Request) -> Flags:
    """Name the parts that selective recomputation repeats, other than the attention core."""
    modules = job.training.recompute_modules
    if list(modules) == ["core_attn"] or all(s.recompute != "selective" for s in job.blocks):
        return []
    return [("recompute-modules", " ".join(modules))]
