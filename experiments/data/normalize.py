"""Clean transcribed tables of measured runs: rows of cells and notes to complete runs, by stated rules.

    python -m experiments.data.normalize data=FOLDER out=experiments/data/measured.csv

Reads every CSV file of the folder. What a row leaves out follows the rules of README.md next to this file and
the words of `words.yaml`; never a rule for one row. A row that cannot be used keeps its reason.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from darts_parallel.config import RECOMPUTE_MODULES, ModelConfig, run_main
from darts_parallel.errors import Entries
from darts_parallel.plans import divisors, write_text
from darts_parallel.problem import Model
from experiments.data import runs
from experiments.data.runs import (
    NOT_PRINTED,
    MeasuredRun,
    Sizes,
    architecture_of,
    preset_sizes,
    write_runs,
)
from experiments.data.table import (
    Entry,
    RowError,
    TableRow,
    first,
    framework_of,
    read_tables,
    usual,
    word_tables,
)

SECONDS = ("iteration_s", "tokens_per_s_per_gpu", "samples_per_s")
MOST_SHARED = 16
"""Up to this a cell counts shared experts, as wide as the routed ones; above it is their width."""
HEAD_SIZE = 128
"""Usual channels of a head."""
LORA_RANK = 16
"""Rank in NeMo 2's recipes for Llama 3 70B; that of smaller models, 8, changes nothing that shows."""
LORA_TARGETS = ("linear_qkv",)
"""Modules with adapters in NeMo 2's performance recipes
(`finetune_recipe(peft_scheme="lora", performance_mode=True)`)."""
TORCHTITAN_SEQ_LEN = 4096
"""Tokens of torchtitan's Qwen3-30B-A3B: its FLOP/s over its tokens/s say so, too, by its own formula."""
TORCHTITAN_RECOMPUTE = "selective: layernorm moe"
"""Its default keeps products of weights and attention, not the grouped products of experts."""
MFU_PEAK = 989.5e12
"""FLOP/s of an H100 in bf16, against which the sources print MFU."""
RATE = r"(\d+(?:\.\d+)?)\s*(?:gbit/s|gbps|gb/s|gb\b|g\b)"
SLOW = 12.5
"""10^9 bytes/s out of a node up to which a network is Ethernet."""
COUNT = r"(?<![\w.])(\d+)(?![\w.])(?!\s*-?\s*(?:gb|gib))|(?<![\w.])(\d+)(?=\s*[x\u00d7])|[x\u00d7]\s*(\d+)"
PrintedLink = tuple[str, float]
"""A link of a node: the name whose fit it shares, and 10^9 bytes/s."""


class NodeKind(NamedTuple):
    """Nodes of one kind; fields as `MeasuredRun` calls them, one of each for every kind."""

    nodes: int
    devices: str
    intra_links: str
    intra_GBps: float  # noqa: N815
    inter_links: str
    inter_GBps: float  # noqa: N815


def read_folder(path: str) -> tuple[list[MeasuredRun], list[tuple[str, str]]]:
    """Read the runs of a folder of CSV files, and the files that are no tables of runs with the reason."""
    tables, others = read_tables(path)
    found = []
    for rows in tables.values():
        found += [normalized(row, rows) for row in rows]
    return found, others


def normalized(row: TableRow, siblings: Sequence[TableRow]) -> MeasuredRun:
    """Complete a row of a file, whose rows are `siblings`, or keep the reason why it cannot be used."""
    told: Entries = {key: row.text(key) for key in ("model", "source", "gpu")}
    told |= {"file": row.file, "row": row.line, "note": _note(row)}
    told["mixture"] = not row.broken and _is_mixture(row)
    try:
        return MeasuredRun(**told, **_fields(row, siblings))
    except RowError as error:
        return MeasuredRun(**told, skipped=str(error))


def _is_mixture(row: TableRow) -> bool:
    several = row.text("n_experts") not in ("", "0", "1")
    return several or _known_sizes(row) is not None or row.says("sparse")


def _note(row: TableRow) -> str:
    stated = word_tables()["stated"]
    absent = [key for key in stated if re.match(r"(not stated.*|unknown.*)?$", row.words(key))]
    origin = next((key for key in (*SECONDS, "mfu_pct") if row.text(key)), "iteration_s")
    told = [NOT_PRINTED + " ".join(absent)] if absent else []
    if origin != "iteration_s":
        told.append(f"seconds from {origin}")
    return "; ".join(told)


def _fields(row: TableRow, siblings: Sequence[TableRow]) -> Entries:
    """Fill all other fields of a run."""
    if row.broken:
        raise RowError(row.broken)
    sizes = _known_sizes(row)
    if sizes is not None:
        row = _complete(row, sizes)
    framework = framework_of(row)
    model = _model(row, siblings, sizes, framework)
    degrees = _degrees(row, sizes is not None)
    tp = degrees["tp"]
    gpus = prod(degrees.values())
    batch = _batch(row, framework, degrees, sizes is not None)
    result = model | degrees | batch
    result |= _zero(row, degrees["dp"] * degrees["cp"])
    result |= _measured(row, batch["global_batch_size"], model["seq_len"], gpus)
    stages = _virtual_stages(row, model["num_layers"], degrees["pp"])
    result |= {"virtual_stages": stages, "recompute": row.one_of("recompute")}
    result |= _numbers(row, framework)
    result |= {"printed_precision": row.text("precision"), "precision": row.one_of("precision")}
    result |= _switches(row, framework) | {"offload": row.says("offload")}
    sequence = _stated(row, "sequence_parallel", framework.get("sequence_parallel", True))
    result["sequence_parallel"] = tp > 1 and sequence
    result |= _hardware(row, gpus, row.count("gpus_per_node") or 8)
    if sizes is not None:
        result |= _mixture(row, sizes, degrees)
    blocks = _blocks(row, model["num_layers"], degrees["pp"], stages)
    return result | {"blocks": blocks}


def _numbers(row: TableRow, framework: Entry) -> Entries:
    """Fill the framework, and the formats in which it computes and keeps numbers."""
    recorded = row.says("recorded")
    bits = row.count("gradient_bits") or framework.get("gradient_bits")
    return {
        "framework": framework["name"],
        "gradient_bits": bits,
        "cuda_graphs": _cuda_graphs(row, recorded),
        "fp8_dot_product_attention": _stated(row, "fp8_dot_product_attention", recorded),
    }


def _switch_cell(
    row: TableRow,
    key: str,
    kind: str,
) -> Any:
    """Read the cell of a switch: a flag, a number, a name or names."""
    if kind == "flag":
        return _stated(row, key, False)
    value: Any = yaml.safe_load(row.words(key))  # type: ignore[no-untyped-call]
    return value.split() if key == "lora_targets" else value


def _cuda_graphs(row: TableRow, recorded: bool) -> str:
    """Read which passes are recorded: whole iterations by the cell, single layers by the notes."""
    if row.says("recorded_layers"):
        return "per_layer"
    return "full_iteration" if _stated(row, "cuda_graphs", recorded) else "none"


def _switches(row: TableRow, framework: Entry) -> Entries:
    """Fill the switches of the run: a cell of their name, else the table `switches`, else unknown.

    An entry of the table names versions, sources or devices, never a framework alone.
    """
    known = {}
    origin = {}
    named = replace(row, cells=row.cells | {"framework": framework["name"]})
    lora = row.says("lora")
    for key, kind in word_tables()["switch_cells"].items():
        if kind == "adapter" and not lora:
            continue
        if row.text(key) and kind != "recipe":
            known[key] = _switch_cell(row, key, kind)
            origin[key] = "printed"
        for entry in word_tables()["switches"]:
            if key in entry["set"] and key not in known and named.matches(entry["when"]):
                value = entry["set"][key]
                known[key] = tuple(value) if isinstance(value, list) else value
                origin[key] = entry["by"]
    if not framework.get("fused_attention", True) and "attention_kernel" not in known:
        known["attention_kernel"] = "unfused"
        origin["attention_kernel"] = "recipe"
    if lora:
        rank = re.search(r"lora rank (\d+)", row.words("notes", "how_read"))
        known["lora_rank"] = int(rank[1]) if rank else known.get("lora_rank", LORA_RANK)
        known["lora_targets"] = tuple(known.get("lora_targets", LORA_TARGETS))
    told = " ".join(f"{key}={value}" for key, value in origin.items())
    return known | {"switches_from": told}


def _stated(row: TableRow, key: str, otherwise: bool) -> bool:
    """Read a switch: what the cell says, else what holds without it."""
    stated = re.match(r"(1|true|yes|on\b|full)|(0|false|no\b|none|off)", row.words(key))
    return bool(stated[1]) if stated else otherwise


# --- models


def _known_sizes(row: TableRow) -> Sizes | None:
    """Find the sizes of a mixture or hybrid; None where the row is of another model, or of unknown sizes."""
    if row.says("hybrid"):
        return None
    try:
        sizes = _named_sizes(row) or _own_sizes(row)
        layers = row.count("layers")
    except RowError:
        return None
    if not sizes:
        return None
    for cell, key in word_tables()["expert_cells"].items():
        sizes[key] = row.count(cell) or sizes.get(key)
    sizes["moe_expert_capacity_factor"] = 1.0 if row.says("token_drop") else None
    if layers and layers != sizes["num_layers"]:
        # a proxy keeps the dense layers that the row prints
        sizes |= {
            "num_layers": layers,
            "first_k_dense_replace": min(_dense_layers(row), layers),
        }
        if isinstance(sizes.get("moe_layer_freq"), list):
            sizes["moe_layer_freq"] = sizes["moe_layer_freq"][:layers]
    return sizes


def _named_sizes(row: TableRow) -> Sizes:
    known = first("mixtures", row.words("model"))
    if known is None:
        return {}
    return dict(known.get("sizes") or preset_sizes(known["preset"]))


def _dense_layers(row: TableRow) -> int:
    dense = row.text("dense_first_layers")
    return int(dense) if dense.isdigit() else 0


def _own_sizes(row: TableRow) -> Sizes:
    """Read the sizes of a mixture without a public name, from the cells that a Llama-like block needs."""
    tables = word_tables()
    cells = tables["expert_cells"] | tables["size_cells"]
    found: Sizes = {key: row.count(cell) for cell, key in cells.items()}
    if None in found.values() or found["num_experts"] < 2:
        return {}
    width = found["moe_ffn_hidden_size"]
    shared = row.count("shared_experts") or 0
    if shared <= MOST_SHARED:
        shared *= width
    found["num_kv_heads"] = row.count("kv_heads")
    found["ffn_hidden_size"] = row.count("ffn") or width
    found["moe_shared_expert_intermediate_size"] = shared or None
    found["first_k_dense_replace"] = _dense_layers(row)
    return found | tables["unnamed_block"]


def _complete(row: TableRow, sizes: Sizes) -> TableRow:
    """Fill the cells of a mixture's row by its public configuration and its source's defaults."""
    cells = dict(row.cells)
    for cell, key in (*word_tables()["size_cells"].items(), ("ffn", "ffn_hidden_size")):
        if row.count(cell) is None:
            cells[cell] = str(sizes[key])
    cells["kv_heads"] = str(sizes.get("num_kv_heads") or sizes["num_heads"])
    if row.says("mxfp8"):
        cells["precision"] = "mxfp8"
    if row.says("fsdp"):
        cells["zero"] = "3"  # the column says it of all rows of the table at once
    cells |= _completed_batch(row)
    pp = row.count("pp") or 1
    if row.says("folding") and not row.text("vpp_chunks"):
        cells["vpp_chunks"] = str(sizes["num_layers"] // pp)
    filled = replace(row, cells=cells)
    rate = None if any(row.number(key) for key in SECONDS) else _flops_per_gpu(row)
    if rate:
        flops = _model_flops(filled, sizes)
        cells["iteration_s"] = repr(flops / (rate * row.require("n_gpus")))
    return filled


def _completed_batch(row: TableRow) -> dict[str, str]:
    """Fill the batch that the notes imply, and torchtitan's defaults."""
    filled: dict[str, str] = {}
    if row.count("global_batch"):
        return filled
    if row.says("torchtitan") and row.count("micro_batch"):
        filled["seq_len"] = row.text("seq_len") or str(TORCHTITAN_SEQ_LEN)
        filled["num_microbatches"] = "1"
        filled["recompute"] = row.text("recompute") or TORCHTITAN_RECOMPUTE
    implied = re.search(r"global batch (\d+) implied", row.words("notes"))
    if implied:
        filled["global_batch"] = implied[1]
    return filled


def _flops_per_gpu(row: TableRow) -> float | None:
    """Read the model FLOP/s of a GPU; TFLOP/s count in the folding paper alone."""
    share = row.number("mfu_pct")
    if share:
        return share / 100 * MFU_PEAK
    rate = row.number("tflops_per_gpu")
    return rate * 1e12 if rate and row.says("folding") else None


def _model_flops(row: TableRow, sizes: Sizes) -> float:
    """Count the model FLOP of an iteration, with the half of the attention matrix below the diagonal.

    The long contexts of the folding paper say so: with the whole matrix its runs of 16k to 128k tokens
    would be 1.2 to 1.4 times slower, against the cost model, than its runs of 4k.
    """
    seq_len = row.require("seq_len")
    batch = row.require("global_batch")
    config = ModelConfig(**(sizes | {"name": "", "max_seq_len": max(seq_len, 1)}))
    model = Model(config, fused_attention=True)
    none = model.flops_per_token(0)
    whole = model.flops_per_token(seq_len)
    return (none + (whole - none) / 2.0) * batch * seq_len


def _model(
    row: TableRow,
    siblings: Sequence[TableRow],
    sizes: Sizes | None,
    framework: Entry,
) -> Sizes:
    """Fill the sizes of a dense model, and those of a mixture that its cells show."""
    family = _family(row, sizes)
    model = {key: value for key, value in family.items() if key in runs.DEFAULTS}
    model["num_layers"] = row.require("layers")
    hidden = row.require("hidden")
    heads = row.count("heads") or usual(row, siblings, "heads", "hidden")
    if heads is None:
        heads = min(divisors(hidden), key=lambda number: abs(hidden / number - HEAD_SIZE))
    width = row.count("ffn") or usual(row, siblings, "ffn", "hidden")
    model["hidden_size"] = hidden
    model["seq_len"] = row.require("seq_len")
    model["num_heads"] = heads
    model["num_kv_heads"] = row.count("kv_heads") or heads
    model["vocab_size"] = _vocabulary(row, siblings) or family["vocab_size"]
    model["ffn_hidden_size"] = width or 4 * hidden
    if "tie_embeddings" in framework:
        model["tie_embeddings"] = framework["tie_embeddings"]
    stated = row.number("n_params")
    if "gpt" in family and stated and stated >= 1e6:
        model["gated_mlp"] = _is_gated(model, stated)
    return model


def _family(row: TableRow, sizes: Sizes | None) -> Sizes:
    if sizes is not None:
        gated = sizes.get("gated_mlp", True)
        return {"vocab_size": sizes["vocab_size"], "gated_mlp": gated}
    if (row.count("ep") or 1) > 1 or row.says("sparse"):
        raise RowError("a mixture of experts whose sizes neither the row nor the model's name says")
    return first("models", row.words("model")) or {}


def _vocabulary(row: TableRow, siblings: Sequence[TableRow]) -> int | None:
    """Read the vocabulary from its cell or the notes, or take that of rows of the same model."""
    stated = row.count("vocab")
    if stated:
        return stated
    text = f"{row.text('n_params')} {row.text('notes')}"
    printed = re.search(r"vocab(?:ulary)?\s+(\d{4,7})", text)
    if printed:
        return int(printed[1])
    return usual(row, siblings, "vocab", "model")


def _is_gated(model: Sizes, stated: float) -> bool:
    """Tell whether the MLP is gated, by which count of parameters is closer to the stated one."""
    hidden = model["hidden_size"]
    width = hidden * model["num_kv_heads"] // model["num_heads"]
    attention = 2 * hidden * hidden + 2 * hidden * width
    mlp = hidden * model["ffn_hidden_size"]
    embedding = model["vocab_size"] * hidden
    # two matrices without a gate, three with one
    middle = model["num_layers"] * (attention + 2.5 * mlp) + embedding
    return bool(stated > middle)


def _mixture(row: TableRow, sizes: Sizes, degrees: Entries) -> Entries:
    """Fill the fields of a mixture."""
    ep = row.count("ep") or 1
    tp = degrees["tp"]
    usual = tp if row.says("grok") or row.says("folding") else 1
    etp = row.count("etp") or usual
    stage = prod(degrees.values()) // degrees["pp"]
    if stage % (ep * etp):
        raise RowError(f"ep={ep} times etp={etp} does not divide the {stage} GPUs of a stage")
    preset = (first("mixtures", row.words("model")) or {}).get("preset", "")
    kept = re.findall(r"\w+", row.words("recompute"))
    fields: Entries = {"architecture": architecture_of(preset, sizes), "ep": ep, "etp": etp}
    fields["shard_size"] = 0
    fields["sequence_parallel"] = tp > 1
    if named := tuple(name for name in RECOMPUTE_MODULES if name in kept):
        fields["recompute_modules"] = named
    fields["moe_token_dispatcher_type"] = "flex" if row.says("flex") else "alltoall"
    overlapped = row.says("recorded") or row.says("expert_overlap")
    fields["overlap_moe_expert_parallel_comm"] = overlapped
    return fields


# --- plans


def _degrees(row: TableRow, mixture: bool) -> Entries:
    """Find the degrees dp, tp, pp, cp that multiply to the GPUs.

    Some releases print the data-parallel degree of mixtures beyond ep: it is what the other degrees leave of
    the GPUs.
    """
    tp, pp, cp = (row.count(key) or 1 for key in ("tp", "pp", "cp"))
    dp = row.count("dp")
    gpus = row.count("n_gpus")
    if gpus and (mixture or dp is None):
        dp = gpus // (tp * pp * cp)
    if dp is None:
        raise RowError("n_gpus and dp are missing")
    degrees = {"dp": dp, "tp": tp, "pp": pp, "cp": cp}
    product = prod(degrees.values())
    if gpus and product != gpus:
        raise RowError(
            f"dp({dp}) * tp({tp}) * pp({pp}) * cp({cp}) = {product} is not n_gpus={gpus}"
        )
    return degrees


def _batch(row: TableRow, framework: Entry, degrees: Entries, mixture: bool) -> Entries:
    """Find the number of micro-batches and the global batch."""
    dp = degrees["dp"]
    pp = degrees["pp"]
    micro = row.count("micro_batch")
    count = row.count("num_microbatches")
    batch = row.count("global_batch")
    if batch is None:
        if micro is None or count is None:
            raise RowError(
                "global_batch is missing, and micro_batch and num_microbatches do not give it"
            )
        batch = dp * micro * count
    elif mixture and micro:
        count = None  # as printed it counts other data-parallel ranks
    if batch % dp:
        raise RowError(f"global_batch={batch} is not a multiple of dp={dp}")
    if micro is None:
        if count is None:
            torchtitan = framework["name"].startswith("torchtitan") and pp > 1
            count = pp if torchtitan else batch // dp
        micro = max(batch // (dp * count), 1)
    elif count is None:
        count = max(batch // (dp * micro), 1)
    if dp * micro * count != batch:
        raise RowError(
            f"dp({dp}) * micro_batch({micro}) * num_microbatches({count}) = {dp * micro * count} "
            f"is not global_batch={batch}"
        )
    return {"num_micro_batches": count, "global_batch_size": batch}


def _zero(row: TableRow, ranks: int) -> Entries:
    """Find the ZeRO stage, and the ranks that share a state (0: all of them).

    Args:
        ranks: dp * cp: context-parallel ranks hold the same weights, and share them too.
    """
    stage = int(row.one_of("zero"))
    text = row.words("zero").replace("fsdp2", "fsdp")
    group = re.search(r"(?:shard(?:ing)? group|hsdp|hybrid\w*|fsdp)\D{0,12}(\d+)", text)
    shard = int(group[1]) if group else 0
    if ranks == 1 or stage == 0:
        return {"zero_stage": 0, "shard_size": 0}
    if row.says("torchtitan") and (row.count("pp") or 1) > 1:
        stage = min(stage, 1)  # its pipelines keep what is gathered until the last micro-batch
    if shard >= ranks or ranks % max(shard, 1):
        shard = 0
    return {"zero_stage": stage, "shard_size": shard}


def _virtual_stages(row: TableRow, layers: int, pp: int) -> int:
    stated = row.count("vpp_chunks")
    interleaved = re.search(r">\s*1|interleav", row.words("vpp_chunks"))
    if pp == 1 or (stated is None and not interleaved):
        return 1
    dividing = (chunks for chunks in range(2, layers // pp + 1) if layers % (pp * chunks) == 0)
    return stated or next(dividing, 2)


def _blocks(
    row: TableRow,
    layers: int,
    pp: int,
    chunks: int,
) -> tuple[int, ...]:
    """Count the blocks of every chunk; embedding is a layer before them, head and loss two after them."""
    stages = pp * chunks
    counts = _layout_blocks(row, layers, stages)
    if counts is None and chunks == 1:
        counts = _printed_stages(row, layers, pp)
    if counts is None:
        counts = _even_blocks(row, layers, stages)
    if min(counts) < 0 or 0 in counts[1:-1]:
        raise RowError(f"a stage without layers: {' '.join(map(str, counts))} blocks per stage")
    return tuple(counts)


def chunks_of(layout: str) -> list[str]:
    """Return the symbols of every chunk of a layout, e.g. `Ettt`, `tt`, `m`, `L`.

    Args:
        layout: As Megatron-LM's `--pipeline-model-parallel-layout` takes it: chunks are parted by `|`, `x*3`
            and `(tt|)*3` repeat, commas mean nothing.
    """
    text = layout.replace(",", "")
    for pattern in (r"\(([^()]*)\)\*(\d+)", r"([A-Za-z])\*(\d+)"):
        text = re.sub(pattern, lambda found: found[1] * int(found[2]), text)
    return text.split("|")


def _layout_blocks(row: TableRow, layers: int, stages: int) -> list[int] | None:
    """Count the blocks in a layout of E (embedding), t (block), m (prediction module) and L (head)."""
    layout = re.sub(r"\s", "", row.text("pp_layout"))
    if not re.fullmatch(r"[EtmL|()*\d]+", layout):
        return None
    printed = [chunk.count("t") for chunk in chunks_of(layout)]
    return printed if len(printed) == stages and sum(printed) == layers else None


def _even_blocks(
    row: TableRow,
    layers: int,
    stages: int,
) -> list[int]:
    """Count blocks of equal stages, the first ones larger; embedding and head may count as a layer each."""
    uneven = layers % stages and (layers + 2) % stages == 0
    ends = "type:transformer|embedding" in row.text("notes") or uneven
    total = layers + (2 if ends else 0)
    counts = [total // stages + (stage < total % stages) for stage in range(stages)]
    if ends:
        counts[0] -= 1
        counts[-1] -= 1
    return counts


def _printed_stages(row: TableRow, layers: int, pp: int) -> list[int] | None:
    """Read the blocks per stage of "layers per stage 9 6 6 9 (of 30 entries ...)".

    Entries beyond the blocks (type conversion, embedding, transposes, norm, head) stand half at the
    beginning, half at the end.
    """
    found = re.search(r"layers per stage ([\d ]+)", row.text("notes"))
    if not found:
        return None
    counts = list(map(int, found[1].split()))
    if len(counts) != pp or sum(counts) < layers:
        raise RowError(
            f"layers per stage {found[1].strip()} does not fit pp={pp} and {layers} layers"
        )
    before = (sum(counts) - layers) // 2
    edges = [min(max(edge - before, 0), layers) for edge in accumulate(counts, initial=0)]
    return [end - begin for begin, end in pairwise(edges)]


# --- hardware and figures


def _hardware(row: TableRow, gpus: int, gpus_per_node: int) -> Entries:
    """Fill the fields of a run's hardware; ranks follow the kinds of nodes in their order.

    "12 V100 + 4 T4" counts GPUs, "3 nodes of 4 V100 and 1 node of 4 T4" nodes: whichever adds up to the run's
    GPUs. The nodes are whole, else the largest equal share of their GPUs is used.

    Errors:
        RowError: no known GPU, or kinds whose numbers do not add up.
    """
    used = max(n for n in divisors(gpus) if n <= gpus_per_node)
    several = _several(row, gpus, gpus_per_node) or [CountedGpu(gpus // used, _only_gpu(row))]
    kinds = [_kind_of(row, entry, gpus_per_node) for entry in several]
    columns = zip(NodeKind._fields, zip(*kinds, strict=True), strict=True)
    return {"gpus": gpus, "gpus_per_node": used, **dict(columns)}


def _only_gpu(row: TableRow) -> Entry:
    gpu = first("gpus", row.words("gpu").replace("_", " "))
    if not row.text("gpu"):
        raise RowError("gpu is missing")
    if gpu is None:
        known = sorted({entry["device"] for entry in word_tables()["gpus"]})
        raise RowError(f"gpu={row.text('gpu')} is unknown; known: {', '.join(known)}")
    return gpu


class CountedGpu(NamedTuple):
    """A number of GPUs, or of nodes with them, and the entry of `words.yaml`."""

    number: int
    gpu: Entry


def _several(row: TableRow, gpus: int, gpus_per_node: int) -> list[CountedGpu]:
    """Count the nodes of every kind that the GPU's cell or the notes list; none where there is one kind."""
    for key in ("gpu", "notes"):
        counts = _counted_gpus(row.words(key).replace("_", " "))
        if len({entry.gpu["device"] for entry in counts}) < 2:
            continue
        total = sum(entry.number for entry in counts)
        size = gpus_per_node if total == gpus else 0
        if total * gpus_per_node == gpus:
            size = 1
        if size and all(entry.number % size == 0 for entry in counts):
            return [CountedGpu(number // size, gpu) for number, gpu in counts]
        if key == "gpu":
            raise RowError(
                f"gpu={row.text('gpu')}: several GPUs whose numbers are not those of {gpus}"
            )
    return []


def _counted_gpus(text: str) -> list[CountedGpu]:
    found = []
    for part in re.split(r"\s*(?:\+|;|,|&|\band\b)\s*", text):
        gpu = first("gpus", part)
        number = re.search(COUNT, part)
        if gpu and number:
            digits = number[number.lastindex or 0]
            found.append(CountedGpu(int(digits), gpu))
    return found


def _kind_of(
    row: TableRow,
    counted: CountedGpu,
    gpus_per_node: int,
) -> NodeKind:
    nodes, gpu = counted
    link = gpu["link"]
    rate = (gpu | _instance(row, gpu))["inside"]
    inside = re.search(rf"inside\s+{RATE}", row.words("notes", "source"))
    if inside:
        # a stated rate inside a node is that of the one host bridge or network that all GPUs share
        link = "pcie"
        rate = min(float(inside[1]) / 8.0, rate)
    return NodeKind(nodes, gpu["device"], link, rate, *_network(row, gpus_per_node, gpu))


def _instance(row: TableRow, gpu: Entry) -> Entry:
    """Find the network of the cloud instance that a row names for a kind of node; empty where none."""
    named = re.search(gpu.get("instance", "$^"), row.words("gpu", "notes", "source"))
    return (first("networks", named[0]) if named else None) or {}


def _network(
    row: TableRow,
    gpus_per_node: int,
    gpu: Entry,
) -> PrintedLink:
    """Find the link out of a node.

    In this order: what the row's own notes or source print, what its cloud instance or its cluster is known
    to have (`networks`), what is usual for the GPU (`gpus`).
    """
    printed = _printed_rate(row.words("notes", "source"), gpus_per_node)
    if printed:
        return "ethernet" if printed <= SLOW else "roce", printed
    known = _instance(row, gpu) or first("networks", row.words("notes", "source", "gpu"))
    if known:
        return known["network"], known["out"]
    return "ethernet" if gpu["out"] <= SLOW else "infiniband", gpu["out"]


def _printed_rate(text: str, gpus_per_node: int) -> float | None:
    """Read the 10^9 bytes/s out of a node, one way, that a text prints."""
    several = re.search(rf"(\d+)\s*x\s*{RATE}", text)
    if several and "dgx" not in text[: several.start()][-6:]:
        return int(several[1]) * float(several[2]) / 8.0
    each = re.search(rf"{RATE}\s+per\s+gpu", text)
    if each:
        return float(each[1]) / 8.0 * gpus_per_node
    for pattern in (rf"inter-node\s+{RATE}", rf"{RATE}\s+(?:node-node|inter-?node)"):
        whole = re.search(pattern, text)
        if whole:
            return float(whole[1]) / 8.0
    return None


def _measured(
    row: TableRow,
    batch: int,
    seq_len: int,
    gpus: int,
) -> Entries:
    """Read the seconds of an iteration and the GiB; at least one of them is there."""
    for entry in word_tables()["unusable"]:
        if row.matches(entry["when"]):
            raise RowError(entry["why"])
    # with a chunked loss the logits of a whole micro-batch, which the cost model holds, never exist
    memory = None if row.says("chunked_loss") else row.number("memory_gb")
    if memory and row.says("decimal"):
        memory = memory * 1e9 / 2.0**30
    seconds = _iteration_seconds(row, batch, seq_len * batch / gpus)
    result: Entries = {"iteration_s": seconds, "memory_GiB": memory}
    if row.says("allocated"):
        result["memory_metric"] = runs.ALLOCATED
    if seconds is None and memory is None:
        if not row.says("out_of_memory"):
            raise RowError("no seconds or memory measured")
        result["out_of_memory"] = True
    return result


def _iteration_seconds(row: TableRow, batch: int, tokens_per_gpu: float) -> float | None:
    seconds, tokens, samples = (row.number(key) for key in SECONDS)
    if seconds:
        return seconds
    if tokens:
        return tokens_per_gpu / tokens
    return samples and batch / samples


@dataclass
class NormalizeOptions:
    """Command line of `python -m experiments.data.normalize`."""

    data: str = ""
    """Folder of transcribed tables."""
    out: str = str(runs.SHIPPED)


def normalize(options: NormalizeOptions) -> int:
    """Write the runs of a folder; returns the exit status."""
    found, others = read_folder(options.data)
    write_text(Path(options.out), write_runs(found))
    complete = sum(not run.skipped for run in found)
    print(f"{options.out}: {len(found)} runs, {complete} of them complete")
    print("\n".join(f"{name}: {reason}" for name, reason in others))
    return 0


if __name__ == "__main__":
    raise SystemExit(run_main("experiments.data.normalize", normalize))
