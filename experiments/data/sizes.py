"""Sizes of mixtures of experts and hybrids: by the name of the model or by a row's cells, and as one text."""

import json
import re
from dataclasses import fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from darts_parallel.config.model import ModelConfig
from darts_parallel.config.schema import config_dir
from darts_parallel.problem.model import Model
from experiments.data.table import RowError, TableRow
from experiments.data.words import first

Sizes = dict[str, Any]
"""Fields of `ModelConfig`."""
SPARSE = re.compile(r"\bmoe\b|mixture|mixtral|\d+x\d+b|dbrx|deepseek-?v[23]|grok|\bswitch|a\d+b\b")
"""Names of mixtures of experts."""
HYBRID = re.compile(r"nemotron.?3(?!.?nano)|mamba|hybrid")
"""Names that are never those of a mixture in `words.yaml`."""


def known_sizes(row: TableRow) -> Sizes | None:
    """Find the sizes of a mixture or hybrid; None where the row is of another model, or of unknown sizes."""
    name = row.text("model").lower()
    if HYBRID.search(name):
        return None
    try:
        known = first("mixtures", name)
        sizes = own_sizes(row) if known is None else dict(known.get("sizes") or preset_sizes(known["preset"]))
        layers = row.count("layers")
    except RowError:
        return None
    if not sizes:
        return None
    dropped = re.search(r"token.?drop", row.words("model", "dispatcher", "notes")) and "dropless" not in name
    sizes["moe_expert_capacity_factor"] = 1.0 if dropped else None
    if layers and layers != sizes["num_layers"]:
        sizes["num_layers"] = layers
        # proxies of few layers keep the dense ones that they print
        dense = row.text("dense_first_layers")
        sizes["first_k_dense_replace"] = min(int(dense) if dense.isdigit() else 0, layers)
        if isinstance(sizes.get("moe_layer_freq"), list):
            sizes["moe_layer_freq"] = sizes["moe_layer_freq"][:layers]
    return sizes


def own_sizes(row: TableRow) -> Sizes:
    """Read the sizes of a mixture without a public name, from the cells that a Llama-like block needs."""
    keys = {
        "num_experts": "n_experts", "moe_router_topk": "top_k", "moe_ffn_hidden_size": "moe_ffn",
        "num_layers": "layers", "hidden_size": "hidden", "num_heads": "heads", "vocab_size": "vocab",
    }  # fmt: skip
    found = {key: row.count(cell) for key, cell in keys.items()}
    if any(value is None for value in found.values()) or (found["num_experts"] or 0) < 2:
        return {}
    shared = row.count("shared_experts") or 0
    width = found["moe_ffn_hidden_size"] or 0
    dense = row.text("dense_first_layers")
    return found | {
        "num_kv_heads": row.count("kv_heads"), "gated_mlp": True, "tie_embeddings": False,
        "learned_positions": False, "dropout": False, "linear_bias": False, "norm_bias": False,
        "ffn_hidden_size": row.count("ffn") or width,
        # a number of experts as wide as the routed ones, or the width itself
        "moe_shared_expert_intermediate_size": (shared if shared > 16 else shared * width) or None,
        "first_k_dense_replace": int(dense) if dense.isdigit() else 0,
    }  # fmt: skip


@lru_cache(maxsize=32)
def preset_sizes(name: str) -> Sizes:
    """Read a file of `conf/model`."""
    text = (Path(config_dir()) / "model" / f"{name}.yaml").read_text(encoding="utf-8")
    values: Sizes = yaml.safe_load(text)  # type: ignore[no-untyped-call]
    return values


def names_experts(row: TableRow) -> bool:
    """Tell whether a row is of a mixture of experts, expressible or not."""
    experts = row.text("n_experts") not in ("", "0", "1")
    return experts or known_sizes(row) is not None or bool(SPARSE.search(row.words("model")))


def architecture(row: TableRow, sizes: Sizes) -> str:
    """Write sizes as a file of `conf/model` and what differs from it."""
    known = first("mixtures", row.words("model")) or {}
    preset = known.get("preset", "")
    base = preset_sizes(preset) if preset else {f.name: f.default for f in fields(ModelConfig)}
    differing = {key: value for key, value in sizes.items() if value != base.get(key)}
    told = [f"{key}={json.dumps(value, separators=(',', ':'))}" for key, value in differing.items()]
    return " ".join([preset or "none", *told])


def sizes_of(text: str) -> Sizes:
    """Read what `architecture` wrote."""
    preset, *changes = text.split()
    sizes = {} if preset == "none" else dict(preset_sizes(preset))
    for key, _, value in (change.partition("=") for change in changes):
        sizes[key] = json.loads(value)
    return sizes


def model_flops(row: TableRow, sizes: Sizes) -> float:
    """Count the model FLOP of an iteration, with the half of the attention matrix below the diagonal.

    The long contexts of the folding paper say so: with the whole matrix its runs of 16k to 128k tokens
    would be 1.2 to 1.4 times slower, against the cost model, than its runs of 4k.
    """
    seq_len, batch = (row.require(key) for key in ("seq_len", "global_batch"))
    config = ModelConfig(**(sizes | {"name": "", "max_seq_len": max(seq_len, 1)}))
    model = Model(config, fused_attention=True)
    whole, none = model.flops_per_token(seq_len), model.flops_per_token(0)
    return (none + (whole - none) / 2.0) * batch * seq_len
