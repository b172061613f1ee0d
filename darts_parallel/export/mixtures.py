"""Experts in Megatron-LM's words."""

from itertools import groupby

from darts_parallel.config import ModelConfig, as_yaml
from darts_parallel.errors import Entries
from darts_parallel.export.common import Flags, Request
from darts_parallel.plans import divisors

MOST_RUNS = 4
"""Runs of equal layers up to which a pattern is written run by run."""


def expert_settings(job: Request) -> Entries:
    """Return the settings of experts, and of how tokens reach them; empty for a dense model.

    Errors:
        UnsupportedError: a router's bias apart from those of the products.
    """
    config = job.model
    if config.num_experts is None:
        return {}
    if config.moe_router_bias != config.linear_bias:
        raise job.refuse(
            f"model={config.name} has moe_router_bias={as_yaml(config.moe_router_bias)} with "
            f"linear_bias={as_yaml(config.linear_bias)}, and its router has a bias where products have",
            "equal values of both",
        )
    flex = job.training.moe_token_dispatcher_type == "flex"
    wide = any(group.domain_nodes > 1 for group in job.problem.cluster.groups)
    known: Entries = {"score_function": config.score_function, "wide_domains": wide}
    known["expert_width"] = config.moe_ffn_hidden_size or config.mlp_width
    known["expert_layers"] = layer_frequency(config)
    known["wide_router"] = flex or config.score_function == "sigmoid"
    return known


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
