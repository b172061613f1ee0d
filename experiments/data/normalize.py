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
from typing import Any

from darts_parallel.config import RECOMPUTE_MODULES, ModelConfig, run_main
from darts_parallel.plans import write_text
from darts_parallel.problem import Model
from experiments.comparison.layouts import chunks_of
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
    RowError,
    TableRow,
    first,
    framework_of,
    read_tables,
    usual,
    word_tables,
)

STATED = (
    "dp",
    "micro_batch",
    "num_microbatches",
    "global_batch",
    "heads",
    "vocab",
    "zero",
    "recompute",
    "sequence_parallel",
    "precision",
)
"""Cells whose absence a run's note tells."""
SECONDS = ("iteration_s", "tokens_per_s_per_gpu", "samples_per_s")
EXPERT_CELLS = {
    "num_experts": "n_experts",
    "moe_router_topk": "top_k",
    "moe_ffn_hidden_size": "moe_ffn",
}
HEAD_SIZE = 128
LORA_RANK = 16
"""Rank in NeMo 2's recipes for Llama 3 70B; that of smaller models, 8, changes nothing that shows."""
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
Link = tuple[str, float]
"""Name whose fit it shares, and 10^9 bytes/s."""


def read_folder(path: str) -> tuple[list[MeasuredRun], list[tuple[str, str]]]:
    """Read the runs of a folder of CSV files, and the files that are no tables of runs with the reason."""
    tables, others = read_tables(path)
    return [normalized(row, rows) for rows in tables.values() for row in rows], others


def normalized(row: TableRow, siblings: Sequence[TableRow]) -> MeasuredRun:
    """Complete a row of a file, whose rows are `siblings`, or keep the reason why it cannot be used."""
    told: dict[str, Any] = {key: row.text(key) for key in ("model", "source", "gpu")}
    told |= {"file": row.file, "row": row.line, "note": _note(row)}
    told["mixture"] = not row.broken and (
        row.text("n_experts") not in ("", "0", "1")
        or _known_sizes(row) is not None
        or row.says("sparse")
    )
    try:
        return MeasuredRun(**told, **_fields(row, siblings))
    except RowError as error:
        nothing = str(error).startswith(("no seconds", "out of memory", "a relative figure"))
        printed = any(row.text(key) for key in ("iteration_s", "memory_gb", "tokens_per_s_per_gpu"))
        return MeasuredRun(**told, skipped=str(error), has_figures=printed and not nothing)


def _note(row: TableRow) -> str:
    absent = [key for key in STATED if re.match(r"(not stated.*|unknown.*)?$", row.words(key))]
    origin = next((key for key in (*SECONDS, "mfu_pct") if row.text(key)), "iteration_s")
    told = [NOT_PRINTED + " ".join(absent)] if absent else []
    return "; ".join(told + ([f"seconds from {origin}"] if origin != "iteration_s" else []))


def _fields(row: TableRow, siblings: Sequence[TableRow]) -> dict[str, Any]:
    """Fill all other fields of a run."""
    if row.broken:
        raise RowError(row.broken)
    sizes = _known_sizes(row)
    row = row if sizes is None else _complete(row, sizes)
    framework = framework_of(row)
    model, degrees = _model(row, siblings, sizes, framework), _degrees(row)
    layers, tp, pp = model["num_layers"], degrees["tp"], degrees["pp"]
    gpus, batch = prod(degrees.values()), _batch(row, framework, degrees)
    zero = _zero(row, degrees["dp"] * degrees["cp"])
    figures = _measured(row, batch["global_batch_size"], model["seq_len"], gpus)
    chunks, precision = _virtual_stages(row, layers, pp), row.one_of("precision")
    if row.says("other_adapters"):
        raise RowError(
            "adapters on weights of 4 bits, or other than LoRA, are not in the cost model"
        )
    shards_sequence = _stated(row, "sequence_parallel", framework.get("sequence_parallel", True))
    result = {
        "fused_attention": framework.get("fused_attention", True),
        **model,
        **degrees,
        **batch,
        **zero,
        **figures,
        "framework": framework["name"],
        "framework_family": framework["family"],
        "gradient_bits": row.count("gradient_bits") or framework.get("gradient_bits"),
        "cuda_graphs": "full_iteration"
        if _stated(row, "cuda_graphs", row.says("recorded"))
        else "none",
        "fp8_dot_product_attention": _stated(
            row, "fp8_dot_product_attention", row.says("recorded")
        ),
        "printed_precision": row.text("precision"),
        "precision": precision,
        "lora_rank": LORA_RANK if row.says("lora") else 0,
        "virtual_stages": chunks,
        "recompute": row.one_of("recompute"),
        "sequence_parallel": tp > 1 and shards_sequence,
        "offload": row.says("offload"),
        **_hardware(row, gpus, row.count("gpus_per_node") or 8),
    }
    if sizes is not None:
        result |= _mixture(row, sizes, tp)
    return result | {"blocks": _blocks(row, layers, pp, chunks)}


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
        known = first("mixtures", row.words("model"))
        sizes = (
            dict(known.get("sizes") or preset_sizes(known["preset"])) if known else _own_sizes(row)
        )
        layers = row.count("layers")
    except RowError:
        return None
    if not sizes:
        return None
    sizes |= {key: count for key, cell in EXPERT_CELLS.items() if (count := row.count(cell))}
    sizes["moe_expert_capacity_factor"] = 1.0 if row.says("token_drop") else None
    if layers and layers != sizes["num_layers"]:
        sizes["num_layers"] = layers
        # proxies of few layers keep the dense ones that they print
        sizes["first_k_dense_replace"] = min(_dense_layers(row), layers)
        if isinstance(sizes.get("moe_layer_freq"), list):
            sizes["moe_layer_freq"] = sizes["moe_layer_freq"][:layers]
    return sizes


def _dense_layers(row: TableRow) -> int:
    dense = row.text("dense_first_layers")
    return int(dense) if dense.isdigit() else 0


def _own_sizes(row: TableRow) -> Sizes:
    """Read the sizes of a mixture without a public name, from the cells that a Llama-like block needs."""
    keys = {
        "num_layers": "layers",
        "hidden_size": "hidden",
        "num_heads": "heads",
        "vocab_size": "vocab",
    }
    found: Sizes = {key: row.count(cell) for key, cell in (EXPERT_CELLS | keys).items()}
    if None in found.values() or found["num_experts"] < 2:
        return {}
    shared, width = row.count("shared_experts") or 0, found["moe_ffn_hidden_size"]
    return found | {
        "num_kv_heads": row.count("kv_heads"),
        "gated_mlp": True,
        "tie_embeddings": False,
        "learned_positions": False,
        "dropout": False,
        "linear_bias": False,
        "norm_bias": False,
        "ffn_hidden_size": row.count("ffn") or width,
        # a number of experts as wide as the routed ones, or the width itself
        "moe_shared_expert_intermediate_size": (shared if shared > 16 else shared * width) or None,
        "first_k_dense_replace": _dense_layers(row),
    }


def _complete(row: TableRow, sizes: Sizes) -> TableRow:
    """Fill the cells of a mixture's row by its public configuration and its source's defaults."""
    cells = dict(row.cells)
    for cell, key in (
        ("layers", "num_layers"),
        ("hidden", "hidden_size"),
        ("heads", "num_heads"),
        ("ffn", "ffn_hidden_size"),
        ("vocab", "vocab_size"),
    ):
        if row.count(cell) is None:
            cells[cell] = str(sizes[key])
    cells["kv_heads"] = str(sizes.get("num_kv_heads") or sizes["num_heads"])
    if row.says("mxfp8"):
        cells["precision"] = "mxfp8"
    tp, pp, cp = (row.count(key) or 1 for key in ("tp", "pp", "cp"))
    gpus, batch, micro = (row.count(key) for key in ("n_gpus", "global_batch", "micro_batch"))
    if gpus and gpus % (tp * pp * cp) == 0:
        cells["dp"] = str(gpus // (tp * pp * cp))  # some releases print the degree beyond ep
    if row.says("fsdp"):
        cells["zero"] = "3"  # the column says it of all rows of the table at once
    ranks = int(cells["dp"]) if cells.get("dp", "").isdigit() else None
    if batch and micro and ranks and batch % (ranks * micro) == 0:
        cells["num_microbatches"] = str(batch // (ranks * micro))
    if row.says("torchtitan") and micro and not batch:
        cells |= {
            "seq_len": cells.get("seq_len") or str(TORCHTITAN_SEQ_LEN),
            "num_microbatches": "1",
        }
        cells["recompute"] = cells.get("recompute") or TORCHTITAN_RECOMPUTE
    implied = re.search(r"global batch (\d+) implied", row.words("notes"))
    if implied and not batch:
        cells["global_batch"] = implied[1]
    if row.says("folding") and not row.text("vpp_chunks"):
        cells["vpp_chunks"] = str(max(sizes["num_layers"] // pp, 1) if pp > 1 else 1)
    if not any(row.number(key) for key in SECONDS):
        share, rate = row.number("mfu_pct"), row.number("tflops_per_gpu")
        rate = (
            share / 100 * MFU_PEAK
            if share
            else rate * 1e12
            if rate and row.says("folding")
            else None
        )
        if rate:
            filled = replace(row, cells=cells)
            cells["iteration_s"] = repr(
                _model_flops(filled, sizes) / (rate * filled.require("n_gpus"))
            )
    return replace(row, cells=cells)


def _model_flops(row: TableRow, sizes: Sizes) -> float:
    """Count the model FLOP of an iteration, with the half of the attention matrix below the diagonal.

    The long contexts of the folding paper say so: with the whole matrix its runs of 16k to 128k tokens
    would be 1.2 to 1.4 times slower, against the cost model, than its runs of 4k.
    """
    seq_len, batch = (row.require(key) for key in ("seq_len", "global_batch"))
    model = Model(
        ModelConfig(**(sizes | {"name": "", "max_seq_len": max(seq_len, 1)})), fused_attention=True
    )
    whole, none = model.flops_per_token(seq_len), model.flops_per_token(0)
    return (none + (whole - none) / 2.0) * batch * seq_len


def _model(
    row: TableRow, siblings: Sequence[TableRow], sizes: Sizes | None, framework: dict[str, Any]
) -> Sizes:
    """Fill the sizes of a dense model, and those of a mixture that its cells show."""
    if sizes is not None:
        family = {"vocab_size": sizes["vocab_size"], "gated_mlp": sizes.get("gated_mlp", True)}
    elif (row.count("ep") or 1) > 1 or row.says("sparse"):
        raise RowError("a mixture of experts whose sizes neither the row nor the model's name says")
    elif row.says("encoder_decoder"):
        raise RowError(
            "encoder-decoder models need their encoder layers, which the schema does not hold"
        )
    else:
        family = first("models", row.words("model")) or {}
    layers, hidden, seq_len = (row.require(key) for key in ("layers", "hidden", "seq_len"))
    divisors = [n for n in range(1, hidden + 1) if hidden % n == 0]
    heads = row.count("heads") or usual(row, siblings, "heads", "hidden")
    heads = heads or min(divisors, key=lambda n: abs(hidden / n - HEAD_SIZE))
    printed = re.search(
        r"vocab(?:ulary)?\s+(\d{4,7})", f"{row.text('n_params')} {row.text('notes')}"
    )
    vocab = row.count("vocab") or (
        int(printed[1]) if printed else usual(row, siblings, "vocab", "model")
    )
    model: Sizes = {key: value for key, value in family.items() if key in runs.DEFAULTS} | {
        "num_layers": layers,
        "hidden_size": hidden,
        "seq_len": seq_len,
        "num_heads": heads,
        "num_kv_heads": row.count("kv_heads") or heads,
        "vocab_size": vocab or family["vocab_size"],
        "ffn_hidden_size": row.count("ffn") or usual(row, siblings, "ffn", "hidden") or 4 * hidden,
    }
    if "tie_embeddings" in framework:
        model["tie_embeddings"] = framework["tie_embeddings"]
    stated = row.number("n_params")
    if "gpt" in family and stated and stated >= 1e6:
        # gated or not: by which count of parameters is closer
        attention = 2 * hidden * hidden + 2 * hidden * (hidden * model["num_kv_heads"] // heads)
        plain, gated = (
            layers * (attention + n * hidden * model["ffn_hidden_size"])
            + model["vocab_size"] * hidden
            for n in (2, 3)
        )
        model["gated_mlp"] = abs(gated - stated) < abs(plain - stated)
    return model


def _mixture(row: TableRow, sizes: Sizes, tp: int) -> dict[str, Any]:
    """Fill the fields of a mixture."""
    ep, etp = row.count("ep") or 1, row.count("etp")
    if etp is None:
        etp = tp if row.says("grok") or row.says("folding") else 1
    stage = (row.count("dp") or 1) * tp * (row.count("cp") or 1)
    if stage % (ep * etp):
        raise RowError(f"ep={ep} times etp={etp} does not divide the {stage} GPUs of a stage")
    recorded, kept = row.says("recorded"), row.words("recompute")
    preset = (first("mixtures", row.words("model")) or {}).get("preset", "")
    return {
        "architecture": architecture_of(preset, sizes),
        "ep": ep,
        "etp": etp,
        "shard_size": 0,
        "sequence_parallel": tp > 1,
        "recompute_modules": tuple(m for m in RECOMPUTE_MODULES if re.search(rf"\b{m}\b", kept)),
        "moe_token_dispatcher_type": "flex" if row.says("flex") else "alltoall",
        "overlap_moe_expert_parallel_comm": recorded or row.says("expert_overlap"),
    }


# --- plans


def _degrees(row: TableRow) -> dict[str, int]:
    """Find the degrees dp, tp, pp, cp that multiply to the GPUs."""
    tp, pp, cp = (row.count(key) or 1 for key in ("tp", "pp", "cp"))
    dp, gpus = row.count("dp"), row.count("n_gpus")
    if dp is None and gpus is None:
        raise RowError("n_gpus and dp are missing")
    dp = (gpus or 0) // (tp * pp * cp) if dp is None else dp
    degrees = {"dp": dp, "tp": tp, "pp": pp, "cp": cp}
    if gpus and (product := prod(degrees.values())) != gpus:
        raise RowError(
            f"dp({dp}) * tp({tp}) * pp({pp}) * cp({cp}) = {product} is not n_gpus={gpus}"
        )
    return degrees


def _batch(row: TableRow, framework: dict[str, Any], degrees: dict[str, int]) -> dict[str, int]:
    """Find the number of micro-batches and the global batch."""
    dp, pp = degrees["dp"], degrees["pp"]
    micro, count, batch = (
        row.count(key) for key in ("micro_batch", "num_microbatches", "global_batch")
    )
    if batch is None:
        if micro is None or count is None:
            raise RowError(
                "global_batch is missing, and micro_batch and num_microbatches do not give it"
            )
        batch = dp * micro * count
    if batch % dp:
        raise RowError(f"global_batch={batch} is not a multiple of dp={dp}")
    if micro is None and count is None:
        count = pp if framework["name"].startswith("torchtitan") and pp > 1 else batch // dp
    micro = max(batch // (dp * (count or 1)), 1) if micro is None else micro
    count = max(batch // (dp * micro), 1) if count is None else count
    if dp * micro * count != batch:
        raise RowError(
            f"dp({dp}) * micro_batch({micro}) * num_microbatches({count}) = {dp * micro * count} "
            f"is not global_batch={batch}"
        )
    return {"num_micro_batches": count, "global_batch_size": batch}


def _zero(row: TableRow, ranks: int) -> dict[str, int]:
    """Find the ZeRO stage, and the ranks that share a state (0: all of them).

    Args:
        ranks: dp * cp: context-parallel ranks hold the same weights, and share them too.
    """
    text = row.words("zero")
    digit = re.match(r"(?:zero-?|stage )?([0-3])\b", text)
    stage = (
        3 if re.search(r"fsdp|hsdp|full.?shard", text) else 1 if "distributed optim" in text else 0
    )
    stage = int(digit[1]) if digit else stage
    plain = text.replace("fsdp2", "fsdp")
    group = re.search(r"(?:shard(?:ing)? group|hsdp|hybrid\w*|fsdp)\D{0,12}(\d+)", plain)
    shard = int(group[1]) if group else 0
    if ranks == 1 or stage == 0:
        return {"zero_stage": 0, "shard_size": 0}
    if row.says("torchtitan") and (row.count("pp") or 1) > 1:
        stage = min(stage, 1)  # its pipelines keep what is gathered until the last micro-batch
    return {
        "zero_stage": stage,
        "shard_size": 0 if shard >= ranks or ranks % max(shard, 1) else shard,
    }


def _virtual_stages(row: TableRow, layers: int, pp: int) -> int:
    stated = row.count("vpp_chunks")
    if pp == 1 or (stated is None and not re.search(r">\s*1|interleav", row.words("vpp_chunks"))):
        return 1
    return stated or next((v for v in range(2, layers // pp + 1) if layers % (pp * v) == 0), 2)


def _blocks(row: TableRow, layers: int, pp: int, chunks: int) -> tuple[int, ...]:
    """Count the blocks of every chunk; embedding is a layer before them, head and loss two after them."""
    stages = pp * chunks
    counts = _printed_stages(row, layers, pp) if chunks == 1 else None
    layout = re.sub(r"\s", "", row.text("pp_layout"))
    if re.fullmatch(
        r"[EtmL|()*\d]+", layout
    ):  # E: embedding, t: block, m: prediction module, L: head
        printed = [chunk.count("t") for chunk in chunks_of(layout)]
        counts = printed if len(printed) == stages and sum(printed) == layers else counts
    if counts is None:
        uneven = layers % stages and (layers + 2) % stages == 0 and pp > 1
        ends = "type:transformer|embedding" in row.text("notes") or uneven
        total = layers + (2 if ends else 0)
        counts = [total // stages + (k < total % stages) for k in range(stages)]
        if ends:
            counts[0] -= 1
            counts[-1] -= 1
    if min(counts) < 0 or any(n == 0 for n in counts[1:-1]):
        raise RowError(f"a stage without layers: {' '.join(map(str, counts))} blocks per stage")
    return tuple(counts)


def _printed_stages(row: TableRow, layers: int, pp: int) -> list[int] | None:
    """Read the blocks per stage of "layers per stage 9 6 6 9 (of 30 entries ...)".

    Entries beyond the blocks (type conversion, embedding, transposes, norm, head) stand half at the
    beginning, half at the end.
    """
    found = re.search(r"layers per stage ([\d ]+)", row.text("notes"))
    if not found:
        return None
    counts = [int(n) for n in found[1].split()]
    if len(counts) != pp or sum(counts) < layers:
        raise RowError(
            f"layers per stage {found[1].strip()} does not fit pp={pp} and {layers} layers"
        )
    before = (sum(counts) - layers) // 2
    edges = [min(max(edge - before, 0), layers) for edge in accumulate(counts, initial=0)]
    return [end - begin for begin, end in pairwise(edges)]


# --- hardware and figures


def _hardware(row: TableRow, gpus: int, gpus_per_node: int) -> dict[str, Any]:
    """Fill the fields of a run's hardware; ranks follow the kinds of nodes in their order.

    "12 V100 + 4 T4" counts GPUs, "3 nodes of 4 V100 and 1 node of 4 T4" nodes: whichever adds up to the run's
    GPUs. The nodes are whole, else the largest equal share of their GPUs is used.

    Errors:
        RowError: no known GPU, or kinds whose numbers do not add up.
    """
    used = next(n for n in range(min(gpus, gpus_per_node), 0, -1) if gpus % n == 0)
    kinds = _several(row, gpus, gpus_per_node)
    if not kinds:
        gpu = first("gpus", row.words("gpu").replace("_", " "))
        if not row.text("gpu"):
            raise RowError("gpu is missing")
        if gpu is None:
            known = sorted({entry["device"] for entry in word_tables()["gpus"]})
            raise RowError(f"gpu={row.text('gpu')} is unknown; known: {', '.join(known)}")
        inside = re.search(rf"inside\s+{RATE}", row.words("notes", "source"))
        # a stated rate inside a node is that of the one host bridge or network that all GPUs share
        intra = (
            ("pcie", min(float(inside[1]) / 8.0, gpu["inside"]))
            if inside
            else (gpu["link"], gpu["inside"])
        )
        kinds = [(gpus // used, gpu["device"], *intra, *_network(row, gpus_per_node, gpu))]
    names = ("nodes", "devices", "intra_links", "intra_GBps", "inter_links", "inter_GBps")
    return {
        "gpus": gpus,
        "gpus_per_node": used,
        **dict(zip(names, zip(*kinds, strict=True), strict=True)),
    }


def _several(
    row: TableRow, gpus: int, gpus_per_node: int
) -> list[tuple[int, str, str, float, str, float]]:
    """Find the kinds of nodes that the GPU's cell or the notes list with their numbers; none where one."""
    for key in ("gpu", "notes"):
        found = []
        for part in re.split(r"\s*(?:\+|;|,|&|\band\b)\s*", row.words(key).replace("_", " ")):
            known, number = first("gpus", part), re.search(COUNT, part)
            if known and number:
                found.append((int(next(group for group in number.groups() if group)), known))
        if len({gpu["device"] for _, gpu in found}) < 2:
            continue
        total = sum(count for count, _ in found)
        size = 1 if total * gpus_per_node == gpus else gpus_per_node if total == gpus else 0
        if size and not any(count % size for count, _ in found):
            return [
                (
                    count // size,
                    gpu["device"],
                    gpu["link"],
                    _instance(row, gpu).get("inside", gpu["inside"]),
                    *_network(row, gpus_per_node, gpu, several=True),
                )
                for count, gpu in found
            ]
        if key == "gpu":
            raise RowError(
                f"gpu={row.text('gpu')}: several GPUs whose numbers are not those of {gpus}"
            )
    return []


def _instance(row: TableRow, gpu: dict[str, Any]) -> dict[str, Any]:
    """Find the network of the cloud instance that a row names for a kind of node; empty where none."""
    named = re.search(gpu.get("instance", "$^"), row.words("gpu", "notes", "source"))
    return (first("networks", named[0]) if named else None) or {}


def _network(row: TableRow, gpus_per_node: int, gpu: dict[str, Any], several: bool = False) -> Link:
    """Find the link out of a node: its instance's where nodes are of `several` kinds.

    Else, in this order: what the row's own notes or source print, what its cluster is known to have
    (`networks`), what is usual for the GPU (`gpus`).
    """
    text = row.words(*(("gpu",) if several else ()), "notes", "source")
    if several and (own := _instance(row, gpu)):
        return own["network"], own["out"]
    printed = _printed_rate(text, gpus_per_node)
    if printed:
        return "ethernet" if printed <= SLOW else "roce", printed
    known = None if several else first("networks", f"{text} {row.words('gpu')}")
    if known:
        return known["network"], known["out"]
    return "ethernet" if gpu["out"] <= SLOW else "infiniband", gpu["out"]


def _printed_rate(text: str, gpus_per_node: int) -> float | None:
    """Read the 10^9 bytes/s out of a node, one way, that a text prints."""
    several = re.search(rf"(\d+)\s*x\s*{RATE}", text)
    if several and "dgx" not in text[: several.start()][-6:]:
        return int(several[1]) * float(several[2]) / 8.0
    patterns = (
        rf"{RATE}\s+per\s+gpu",
        rf"inter-node\s+{RATE}",
        rf"{RATE}\s+(?:node-node|inter-?node)",
    )
    each, *whole = (re.search(pattern, text) for pattern in patterns)
    found = each or next(filter(None, whole), None)
    return float(found[1]) / 8.0 * (gpus_per_node if each else 1) if found else None


def _measured(row: TableRow, batch: int, seq_len: int, gpus: int) -> dict[str, Any]:
    """Read the seconds of an iteration and the GiB; at least one of them is there."""
    flagged = re.search(r"anomalous|suspicious", row.words("notes"))
    if flagged:
        raise RowError(f"flagged in the notes: {flagged[0]}")
    if row.says("relative"):
        raise RowError("a relative figure, not seconds or bytes")
    seconds, tokens, samples = (row.number(key) for key in SECONDS)
    if seconds is None and tokens is not None:
        seconds = batch * seq_len / (tokens * gpus)
    if seconds is None and samples is not None:
        seconds = batch / samples
    # with a chunked loss the logits of a whole micro-batch, which the cost model holds, never exist
    memory = None if row.says("chunked_loss") else row.number("memory_gb")
    out = seconds is None and memory is None and row.says("out_of_memory")
    if seconds is None and memory is None and not out:
        raise RowError("no seconds or memory measured")
    kind: dict[str, Any] = {"memory_metric": runs.ALLOCATED} if row.says("allocated") else {}
    kind |= {"out_of_memory": True, "has_figures": False} if out else {}
    return {"iteration_s": seconds, "memory_GiB": memory, **kind}


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
    print(
        f"{options.out}: {len(found)} runs, {sum(not run.skipped for run in found)} of them complete"
    )
    print("\n".join(f"{name}: {reason}" for name, reason in others))
    return 0


if __name__ == "__main__":
    raise SystemExit(run_main("experiments.data.normalize", __doc__, NormalizeOptions, normalize))
