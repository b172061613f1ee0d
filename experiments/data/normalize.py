"""Clean transcribed tables of measured runs: rows of cells and notes to complete runs, by stated rules.

    python -m experiments.data.normalize data=FOLDER out=experiments/data/measured.csv

Reads every CSV file of the folder. What a row leaves out follows the rules of README.md next to this file and
the words of `words.yaml`; never a rule for one row. A row that cannot be used keeps its reason.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from darts_parallel.config.options import run_main
from darts_parallel.config.schema import RECOMPUTE_MODULES
from darts_parallel.plan.file import write_text
from experiments.comparison.layouts import chunks_of
from experiments.data.machines import hardware
from experiments.data.runs import ALLOCATED, ALTERNATE, DEFAULTS, DEVICE, SHIPPED, MeasuredRun, write_runs
from experiments.data.sizes import SPARSE, Sizes, architecture, known_sizes, model_flops, names_experts
from experiments.data.table import RowError, TableRow, read_tables
from experiments.data.words import Framework, first, framework_of

FLAGGED = re.compile(r"anomalous|suspicious")
"""Words of the transcriber for a run that was disturbed."""
ENCODER_DECODER = re.compile(r"\bu?t5\b|\bul2\b")
FLEX = re.compile(r"deepep|hybridep|hybrid-ep|megatron-bridge|dgxc-benchmarking.*@v25\.(?:0[89]|1\d)")
RECORDED = re.compile(r"\((26\.06(?:\.01)?|26\.08) nemo container\)")
"""Containers of Megatron-Bridge whose MXFP8 recipes on Blackwell run whole iterations as CUDA graphs."""
FOLDING = re.compile(r"2504\.14960")
"""MoE Parallel Folding: every method of its tables is Megatron-Core's."""
OFFLOADED = re.compile(r"full (?:cpu )?offload|(?:opt|par) offl=y|cpu.?offload=(?:true|yes|y|1)")
ALLOCATED_WORDS = re.compile(r"(?:max|peak)[ _]allocated|\banalytic\b")
HEAD_SIZE = 128
LORA_RANK = 16
"""Rank in the performance recipes of NeMo 2 for Llama 3 70B; that for smaller models, 8, makes no difference
that seconds or bytes show."""
TORCHTITAN_SEQ_LEN = 4096
"""Tokens of torchtitan's Qwen3-30B-A3B: its FLOP/s over its tokens/s say so, too, by its own formula."""
MFU_PEAK = 989.5e12
"""FLOP/s of an H100 in bf16, against which the sources print MFU."""
FACTS = ("fused_attention", "gradient_bits", "owner_broadcast_ms", "single_ring")
"""Fields of a framework that its runs have."""
STATED = ("dp", "micro_batch", "num_microbatches", "global_batch", "heads", "vocab", "zero", "recompute",
          "sequence_parallel", "precision")  # fmt: skip
"""Cells whose absence a run's note tells."""
SECONDS = ("iteration_s", "tokens_per_s_per_gpu", "samples_per_s")


def read_folder(path: str) -> tuple[list[MeasuredRun], list[tuple[str, str]]]:
    """Read the runs of a folder of CSV files, and the files that are no tables of runs with the reason.

    Errors:
        ConfigError: the folder does not exist or holds no CSV file.
    """
    rows, others = read_tables(path)
    files: dict[str, list[TableRow]] = defaultdict(list)
    for row in rows:
        files[row.file].append(row)
    return [normalized(row, files[row.file]) for row in rows], others


def normalized(row: TableRow, siblings: Sequence[TableRow]) -> MeasuredRun:
    """Complete a row, or keep the reason why it cannot be used.

    Args:
        siblings: All rows of the same file.
    """
    told: dict[str, Any] = {key: row.text(key) for key in ("model", "source", "gpu")}
    told |= {"file": row.file, "row": row.line, "note": _note(row)}
    told["mixture"] = not row.broken and names_experts(row)
    try:
        return MeasuredRun(**told, **_fields(row, siblings))
    except RowError as error:
        nothing = str(error).startswith(("no seconds", "out of memory", "a relative figure"))
        printed = any(row.text(key) for key in ("iteration_s", "memory_gb", "tokens_per_s_per_gpu"))
        return MeasuredRun(**told, skipped=str(error), has_figures=printed and not nothing)


def _note(row: TableRow) -> str:
    absent = [key for key in STATED if re.match(r"(not stated.*|unknown.*)?$", row.words(key))]
    origin = next((key for key in (*SECONDS, "mfu_pct") if row.text(key)), "iteration_s")
    told = [f"not printed: {' '.join(absent)}"] if absent else []
    return "; ".join(told + ([f"seconds from {origin}"] if origin != "iteration_s" else []))


def _fields(row: TableRow, siblings: Sequence[TableRow]) -> dict[str, Any]:
    """Fill all other fields of a run.

    Errors:
        RowError: the reason why the row cannot be used.
    """
    if row.broken:
        raise RowError(row.broken)
    sizes = known_sizes(row)
    row = row if sizes is None else _complete(row, sizes)
    framework = framework_of(row)
    model = _model(row, siblings, sizes, framework)
    gpus, degrees = _degrees(row)
    count, batch = _batch(row, framework, degrees)
    layers, tp, pp = model["num_layers"], degrees["tp"], degrees["pp"]
    zero, shard = _zero(row, degrees["dp"] * degrees["cp"])
    seconds, memory = _measured(row, batch, model["seq_len"], gpus)
    chunks = _virtual_stages(row, layers, pp)
    allocated = ALLOCATED_WORDS.search(row.words("notes", "how_read"))
    result = {
        **{key: getattr(framework, key) for key in FACTS}, **model, **degrees,
        "framework": framework.name, "framework_family": framework.family,
        "printed_precision": row.text("precision"), "precision": _precision(row),
        "lora_rank": _lora_rank(row), "global_batch_size": batch, "num_micro_batches": count,
        "virtual_stages": chunks, "zero_stage": zero, "shard_size": shard, "recompute": _recompute(row),
        "sequence_parallel": _sequence_parallel(row, framework, tp),
        "offload": bool(OFFLOADED.search(row.words("notes", "zero"))),
        "iteration_s": seconds, "memory_GiB": memory, "memory_metric": ALLOCATED if allocated else DEVICE,
        **hardware(row, gpus, row.count("gpus_per_node") or 8),
    }  # fmt: skip
    if sizes is not None:
        result |= _mixture(row, sizes, tp)
    return result | {"blocks": _blocks(row, layers, pp, chunks)}


def _model(row: TableRow, siblings: Sequence[TableRow], sizes: Sizes | None, framework: Framework) -> Sizes:
    """Fill the sizes of a dense model, and those of a mixture that its cells show."""
    family = _family(row, sizes)
    layers, hidden, seq_len = (row.require(key) for key in ("layers", "hidden", "seq_len"))
    heads = row.count("heads") or _usual(row, siblings, "heads", "hidden") or _heads(hidden)
    vocab = row.count("vocab") or _printed_vocab(row) or _usual(row, siblings, "vocab", "model")
    told = {
        "num_layers": layers, "hidden_size": hidden, "seq_len": seq_len, "num_heads": heads,
        "num_kv_heads": row.count("kv_heads") or heads, "vocab_size": vocab or family["vocab_size"],
        "ffn_hidden_size": row.count("ffn") or _usual(row, siblings, "ffn", "hidden") or 4 * hidden,
    }  # fmt: skip
    model: Sizes = {key: value for key, value in family.items() if key in DEFAULTS} | told
    if framework.tie_embeddings is not None:
        model["tie_embeddings"] = framework.tie_embeddings
    stated = row.number("n_params")
    if "gpt" in family and stated and stated >= 1e6:
        # gated or not: by which count of parameters is closer
        attention = 2 * hidden * hidden + 2 * hidden * (hidden * model["num_kv_heads"] // heads)
        plain, gated = (
            layers * (attention + n * hidden * model["ffn_hidden_size"]) + model["vocab_size"] * hidden
            for n in (2, 3)
        )
        model["gated_mlp"] = abs(gated - stated) < abs(plain - stated)
    return model


# --- models


def _complete(row: TableRow, sizes: Sizes) -> TableRow:
    """Fill the cells of a mixture's row by its public configuration and its source's defaults."""
    cells = dict(row.cells)
    for cell, key in (("layers", "num_layers"), ("hidden", "hidden_size"), ("heads", "num_heads"),
                      ("ffn", "ffn_hidden_size"), ("vocab", "vocab_size")):  # fmt: skip
        if not row.text(cell) or row.count(cell) is None:
            cells[cell] = str(sizes[key])
    cells["kv_heads"] = str(sizes.get("num_kv_heads") or sizes["num_heads"])
    if re.search(r"fp8-mx|mxfp8", row.words("precision")):
        cells["precision"] = "mxfp8"
    tp, pp, cp = (row.count(key) or 1 for key in ("tp", "pp", "cp"))
    gpus = row.count("n_gpus")
    if gpus and gpus % (tp * pp * cp) == 0:
        cells["dp"] = str(gpus // (tp * pp * cp))  # some releases print the degree beyond ep
    if re.search(r"method fsdp\b", row.words("notes")):
        cells["zero"] = "3"  # the column says it of all rows of the table at once
    batch, micro = row.count("global_batch"), row.count("micro_batch")
    ranks = int(cells["dp"]) if cells.get("dp", "").isdigit() else None
    if batch and micro and ranks and batch % (ranks * micro) == 0:
        cells["num_microbatches"] = str(batch // (ranks * micro))
    if "torchtitan" in row.words("source") and micro and not batch:
        cells |= {"seq_len": cells.get("seq_len") or str(TORCHTITAN_SEQ_LEN), "num_microbatches": "1"}
        cells["recompute"] = cells.get("recompute") or "selective, every second product (its default)"
    implied = re.search(r"global batch (\d+) implied", row.words("notes"))
    if implied and not batch:
        cells["global_batch"] = implied[1]
    if FOLDING.search(row.words("source")) and not row.text("vpp_chunks"):
        cells["vpp_chunks"] = str(max(sizes["num_layers"] // pp, 1) if pp > 1 else 1)
    filled = replace(row, cells=cells)
    if not any(row.number(key) for key in SECONDS):
        share, rate = row.number("mfu_pct"), row.number("tflops_per_gpu")
        if share:
            rate = share / 100 * MFU_PEAK
        else:
            rate = rate * 1e12 if rate and FOLDING.search(row.words("source")) else None
        if rate:
            cells["iteration_s"] = repr(model_flops(filled, sizes) / (rate * filled.require("n_gpus")))
    return filled


def _family(row: TableRow, sizes: Sizes | None) -> dict[str, Any]:
    """Find the model family that the name says.

    Errors:
        RowError: a kind of model that the cost model does not hold.
    """
    name = row.words("model")
    if sizes is not None:
        return {"vocab_size": sizes["vocab_size"], "gated_mlp": sizes.get("gated_mlp", True)}
    if (row.count("ep") or 1) > 1 or SPARSE.search(name):
        raise RowError("a mixture of experts whose sizes neither the row nor the model's name says")
    if ENCODER_DECODER.search(name):
        raise RowError("encoder-decoder models need their encoder layers, which the schema does not hold")
    return first("models", name) or {}


def _usual(row: TableRow, siblings: Sequence[TableRow], key: str, like: str) -> int | None:
    """Return the number that rows with the same `like` give most often for `key` (ties: the smallest)."""
    found: Counter[int] = Counter()
    for other in siblings:
        if other.text(like) == row.text(like) and not other.broken:
            try:
                value = other.count(key)
            except RowError:
                continue
            if value:
                found[value] += 1
    return min(found, key=lambda value: (-found[value], value)) if found else None


def _heads(hidden: int) -> int:
    """Return the divisor of `hidden` that makes heads closest to `HEAD_SIZE`."""
    divisors = [n for n in range(1, hidden + 1) if hidden % n == 0]
    return min(divisors, key=lambda n: abs(hidden / n - HEAD_SIZE))


def _printed_vocab(row: TableRow) -> int | None:
    found = re.search(r"vocab(?:ulary)?\s+(\d{4,7})", f"{row.text('n_params')} {row.text('notes')}")
    return int(found[1]) if found else None


def _mixture(row: TableRow, sizes: Sizes, tp: int) -> dict[str, Any]:
    """Fill the fields of a mixture.

    Errors:
        RowError: the mapping contradicts itself.
    """
    ep, etp = row.count("ep") or 1, row.count("etp")
    if etp is None:
        etp = tp if "grok" in row.words("model") or FOLDING.search(row.words("source")) else 1
    stage = (row.count("dp") or 1) * tp * (row.count("cp") or 1)
    if stage % (ep * etp):
        raise RowError(f"ep={ep} times etp={etp} does not divide the {stage} GPUs of a stage")
    told = row.words("dispatcher", "source", "notes")
    recorded = bool(
        RECORDED.search(row.words("source"))
        and re.search(r"deepseek.?v3|qwen3|gpt.?oss", row.words("model"))
        and re.search(r"gb[23]00", row.words("gpu"))
        and re.search(r"mxfp8|fp8-mx", row.words("precision"))
    )
    overlap = re.search(r"ep overlap on|with ep overlap|; ep overlap(?! off)", told)
    return {
        "architecture": architecture(row, sizes), "ep": ep, "etp": etp, "shard_size": 0,
        "sequence_parallel": tp > 1,
        "cuda_graphs": "full_iteration" if recorded else "none", "fp8_dot_product_attention": recorded,
        "recompute_modules": tuple(
            m for m in RECOMPUTE_MODULES if re.search(rf"\b{m}\b", row.words("recompute"))
        ),
        "moe_token_dispatcher_type": "flex" if FLEX.search(told) else "alltoall",
        "overlap_moe_expert_parallel_comm": recorded or bool(overlap),
    }  # fmt: skip


# --- plans


def _degrees(row: TableRow) -> tuple[int, dict[str, int]]:
    """Find GPUs, and the degrees dp, tp, pp, cp that multiply to them."""
    tp, pp, cp = (row.count(key) or 1 for key in ("tp", "pp", "cp"))
    dp, gpus = row.count("dp"), row.count("n_gpus")
    if dp is None and gpus is None:
        raise RowError("n_gpus and dp are missing")
    gpus = gpus or (dp or 1) * tp * pp * cp
    dp = gpus // (tp * pp * cp) if dp is None else dp
    product = dp * tp * pp * cp
    if product != gpus:
        raise RowError(f"dp({dp}) * tp({tp}) * pp({pp}) * cp({cp}) = {product} is not n_gpus={gpus}")
    return gpus, {"dp": dp, "tp": tp, "pp": pp, "cp": cp}


def _batch(row: TableRow, framework: Framework, degrees: dict[str, int]) -> tuple[int, int]:
    """Find the number of micro-batches and the global batch."""
    dp, pp = degrees["dp"], degrees["pp"]
    micro, count, batch = (row.count(key) for key in ("micro_batch", "num_microbatches", "global_batch"))
    if batch is None:
        if micro is None or count is None:
            raise RowError("global_batch is missing, and micro_batch and num_microbatches do not give it")
        batch = dp * micro * count
    if batch % dp:
        raise RowError(f"global_batch={batch} is not a multiple of dp={dp}")
    if micro is None and count is None:
        count = pp if framework.name.startswith("torchtitan") and pp > 1 else batch // dp
    if micro is None:
        micro = max(batch // (dp * (count or 1)), 1)
    if count is None:
        count = max(batch // (dp * micro), 1)
    if dp * micro * count != batch:
        raise RowError(
            f"dp({dp}) * micro_batch({micro}) * num_microbatches({count}) = {dp * micro * count} "
            f"is not global_batch={batch}"
        )
    return count, batch


def _zero(row: TableRow, ranks: int) -> tuple[int, int]:
    """Find the ZeRO stage, and the ranks that share a state (0: all of them).

    Args:
        ranks: dp * cp: context-parallel ranks hold the same weights, and share them too.
    """
    text = row.words("zero")
    digit = re.match(r"(?:zero-?|stage )?([0-3])\b", text)
    stage = 3 if re.search(r"fsdp|hsdp|full.?shard", text) else 1 if "distributed optim" in text else 0
    stage = int(digit[1]) if digit else stage
    group = re.search(
        r"(?:shard(?:ing)? group|hsdp|hybrid\w*|fsdp)\D{0,12}(\d+)", text.replace("fsdp2", "fsdp")
    )
    shard = int(group[1]) if group else 0
    if ranks == 1 or stage == 0:
        return 0, 0
    return stage, 0 if shard >= ranks or ranks % max(shard, 1) else shard


def _recompute(row: TableRow) -> str:
    text = row.words("recompute")
    if re.match(r"none|not stated|no\b|unknown|0|false|sequence-parallel only|$", text):
        return "none"
    if "2nd layer" in text or "every second" in text or "(op" in text or text == "op":
        return ALTERNATE
    if "selective" in text:
        return "selective"
    if re.match(r"full|yes|1|true|on\b|uniform|block|every", text):
        return "full"
    raise RowError(f"recompute={row.text('recompute')} must be none, selective or full")


def _sequence_parallel(row: TableRow, framework: Framework, tp: int) -> bool:
    text = row.words("sequence_parallel")
    stated = re.match(r"(1|true|yes|on\b)|(0|false|no\b|off)", text)
    return tp > 1 and (bool(stated[1]) if stated else framework.sequence_parallel)


def _lora_rank(row: TableRow) -> int:
    text = row.words("model", "notes")
    if re.search(r"\bqlora\b|\bdora\b|prefix.tuning", text):
        raise RowError("adapters on weights of 4 bits, or other than LoRA, are not in the cost model")
    return LORA_RANK if re.search(r"\blora\b", text) else 0


def _precision(row: TableRow) -> str:
    text = row.words("precision")
    for narrow, pattern in (("nvfp4", r"fp4|float4"), ("mxfp8", r"mx-?fp8"), ("fp8", r"fp8|float8")):
        if re.search(pattern, text):
            return narrow
    found = re.search(r"bf16|bfloat16|fp16|float16|half|fp32|float32", text)
    if not found:
        if text and not text.startswith("not stated"):
            raise RowError(f"precision={row.text('precision')} must be bf16, fp16, fp32 or fp8")
        return "bf16"
    return {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32"}.get(found[0], found[0])


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
    if re.fullmatch(r"[EtmL|()*\d]+", layout):  # E: embedding, t: block, m: prediction module, L: head
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
        raise RowError(f"layers per stage {found[1].strip()} does not fit pp={pp} and {layers} layers")
    before = (sum(counts) - layers) // 2
    edges = [min(max(edge - before, 0), layers) for edge in accumulate(counts, initial=0)]
    return [end - begin for begin, end in pairwise(edges)]


# --- figures


def _measured(row: TableRow, batch: int, seq_len: int, gpus: int) -> tuple[float | None, float | None]:
    """Read the seconds of an iteration and the GiB; at least one of them is there.

    Errors:
        RowError: the transcriber flagged the run, or nothing was measured.
    """
    flagged = FLAGGED.search(row.words("notes"))
    if flagged:
        raise RowError(f"flagged in the notes: {flagged[0]}")
    if row.words("notes").startswith("relative"):
        raise RowError("a relative figure, not seconds or bytes")
    seconds, tokens, samples = (row.number(key) for key in SECONDS)
    if seconds is None and tokens is not None:
        seconds = batch * seq_len / (tokens * gpus)
    if seconds is None and samples is not None:
        seconds = batch / samples
    # with a chunked loss the logits of a whole micro-batch, which the cost model holds, never exist
    memory = None if "chunked loss" in row.words("notes") else row.number("memory_gb")
    if seconds is None and memory is None:
        out = re.match(r"1|yes|true|oom", row.words("oom"))
        raise RowError("out of memory: nothing was measured" if out else "no seconds or memory measured")
    return seconds, memory


@dataclass
class NormalizeOptions:
    """Command line of `python -m experiments.data.normalize`."""

    data: str = ""
    """Folder of transcribed tables."""
    out: str = str(SHIPPED)


def normalize(options: NormalizeOptions) -> int:
    """Write the runs of a folder; returns the exit status."""
    runs, others = read_folder(options.data)
    write_text(Path(options.out), write_runs(runs))
    print(f"{options.out}: {len(runs)} runs, {sum(not run.skipped for run in runs)} of them complete")
    print("\n".join(f"{name}: {reason}" for name, reason in others))
    return 0


if __name__ == "__main__":
    raise SystemExit(run_main("experiments.data.normalize", __doc__, NormalizeOptions, normalize))
