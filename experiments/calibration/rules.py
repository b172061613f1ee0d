"""A row's cells to a complete run, by stated rules for what the row leaves out; never by row.

| missing | rule |
| --- | --- |
| degree tp, pp, cp | 1; dp is what remains of n_gpus |
| micro-batch and number of micro-batches | both from the global batch; neither given: micro-batch 1 |
| number of micro-batches of a torchtitan pipeline | its default, the pipeline degree |
| heads, vocabulary, ffn | the value that rows of the same file, width (and for the vocabulary model) give most often; else head size 128, the family's vocabulary, 4 x hidden |
| kv heads | as heads |
| precision | bf16; mxfp8 and nvfp4 by their names, all other 8-bit kinds as fp8 |
| sequence parallelism | by stack (`stacks.py`): on where tp > 1, off in software before 2022 |
| recomputation | none |
| rank and place of adapters | of rows that say LoRA: 16, beside `linear_qkv`, as NeMo's performance recipes set them (`finetune_recipe(peft_scheme="lora", performance_mode=True)`) |
| gauge of the memory | what the device shows; `allocated` where notes or reading say that the allocator's peak or a formula is printed, in which neither context nor communication buffers nor unused blocks are |
| memory of runs with a chunked loss | left out: the cost model holds all logits of a micro-batch |
| CPU offload | the whole optimizer state lies in host memory and travels over its link in every step (`Plan.offload`); offloaded 16-bit parameters, an eighth of its bytes, are left aside |
| interleaving stated without its degree | the smallest number above 1 that divides the blocks of a stage |
| layers per stage | equal, the first stages take the remainder; `type:transformer|embedding` in the notes counts embedding and head as a layer each, and so do layouts whose blocks alone do not divide (126 of Llama-3 405B); "layers per stage ..." in the notes is taken as printed |
| seconds per iteration | from tokens/s/GPU or samples/s, never from TFLOP/s |
"""  # noqa: E501

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from experiments.calibration.families import Family, family_of, gated_by_size
from experiments.calibration.mixtures import complete
from experiments.calibration.parameters import ALLOCATED, DEVICE
from experiments.calibration.rows import Row, RowError
from experiments.calibration.stacks import Stack, stack_of

OFFLOADED = re.compile(r"full (?:cpu )?offload|(?:opt|par) offl=y|cpu.?offload=(?:true|yes|y|1)")
FLAGGED = re.compile(r"anomalous|suspicious")
"""Words of the transcriber for a run that was disturbed."""
ALTERNATE = "alternate"
"""Full recomputation of every second block; also the nearest to torchtitan's operator-wise selective
recomputation, which repeats every second matrix product (torchtitan, `activation_checkpoint`)."""
HEAD_SIZE = 128
CHUNKED_LOSS = re.compile(r"chunked loss")
"""The logits of a whole micro-batch never exist, so that the model's memory is not the run's."""
ALLOCATED_WORDS = re.compile(r"(?:max|peak)[ _]allocated|\banalytic\b")
ADAPTERS = re.compile(r"\blora\b")
NOT_MODELLED = re.compile(r"\bqlora\b|\bdora\b|prefix.tuning")
LORA_RANK, LORA_TARGETS = 16, ("linear_qkv",)
"""Of the performance recipes of NeMo 2 for Llama 3 70B; its rank for smaller models, 8, makes no difference
that seconds or bytes show."""


@dataclass(frozen=True)
class Run:
    """Everything that the cost model must know of one measured run."""

    row: Row
    stack: Stack
    family: Family
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    gated_mlp: bool
    vocab: int
    seq_len: int
    tied: bool
    precision: str
    gpus: int
    gpus_per_node: int
    dp: int
    tp: int
    pp: int
    cp: int
    virtual_stages: int
    micro_batch: int
    num_micro_batches: int
    global_batch: int
    zero_stage: int
    shard_size: int
    recompute: str
    """`none`, `selective`, `full` or `ALTERNATE`."""
    sequence_parallel: bool
    offload: bool
    """The optimizer state lies in host memory."""
    lora_rank: int
    """Rank of the adapters that alone are trained; 0: all weights are."""
    iteration_s: float | None
    memory_bytes: float | None
    gauge: str
    """What `memory_bytes` counts: all that is gone of a device (`DEVICE`), or what was `ALLOCATED`."""


def read_run(row: Row, siblings: Sequence[Row]) -> Run:
    """The run of a row.

    Args:
        siblings: All rows of the same file.

    Errors:
        RowError: the reason why the row cannot be used.
    """
    if row.broken:
        raise RowError(row.broken)
    row = complete(row)
    family, stack = family_of(row), stack_of(row)
    layers, hidden, seq_len = (row.require(key) for key in ("layers", "hidden", "seq_len"))
    heads = row.count("heads") or _usual(row, siblings, "heads", "hidden") or _heads(hidden)
    vocab = row.count("vocab") or _printed_vocab(row) or _usual(row, siblings, "vocab", "model")
    ffn = row.count("ffn") or _usual(row, siblings, "ffn", "hidden") or 4 * hidden
    kv_heads = row.count("kv_heads") or heads
    gpus, degrees = _degrees(row)
    micro, count, batch = _batch(row, stack, degrees)
    gated = gated_by_size(row, family, hidden, hidden * kv_heads // heads, ffn, vocab or family.vocab)
    zero, shard = _zero(row, degrees["dp"] * degrees["cp"])
    iteration, memory = _measured(row, batch, seq_len, gpus)
    return Run(
        row=row, stack=stack, family=family, layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads,
        ffn=ffn, gated_mlp=gated, vocab=vocab or family.vocab, seq_len=seq_len,
        tied=family.tied if stack.tied is None else stack.tied, precision=_precision(row), gpus=gpus,
        gpus_per_node=row.count("gpus_per_node") or 8, **degrees,
        virtual_stages=_virtual_stages(row, layers, degrees["pp"]),
        micro_batch=micro, num_micro_batches=count, global_batch=batch, zero_stage=zero, shard_size=shard,
        recompute=_recompute(row), sequence_parallel=_sequence_parallel(row, stack, degrees["tp"]),
        offload=bool(OFFLOADED.search(f"{row.text('notes')} {row.text('zero')}".lower())),
        lora_rank=_lora_rank(row),
        iteration_s=iteration, memory_bytes=memory, gauge=_gauge(row),
    )  # fmt: skip


def _usual(row: Row, siblings: Sequence[Row], key: str, like: str) -> int | None:
    """The number that rows with the same `like` give most often for `key` (ties: the smallest)."""
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
    """The divisor of `hidden` that makes heads nearest to `HEAD_SIZE`."""
    divisors = [n for n in range(1, hidden + 1) if hidden % n == 0]
    return min(divisors, key=lambda n: abs(hidden / n - HEAD_SIZE))


def _printed_vocab(row: Row) -> int | None:
    found = re.search(r"vocab(?:ulary)?\s+(\d{4,7})", f"{row.text('n_params')} {row.text('notes')}")
    return int(found[1]) if found else None


def _degrees(row: Row) -> tuple[int, dict[str, int]]:
    """GPUs, and the degrees dp, tp, pp, cp that multiply to them."""
    tp, pp, cp = (row.count(key) or 1 for key in ("tp", "pp", "cp"))
    dp, gpus = row.count("dp"), row.count("n_gpus")
    if dp is None and gpus is None:
        raise RowError("n_gpus and dp are missing")
    if gpus is None:
        gpus = (dp or 1) * tp * pp * cp
    if dp is None:
        dp = gpus // (tp * pp * cp)
    if dp * tp * pp * cp != gpus:
        raise RowError(
            f"dp({dp}) * tp({tp}) * pp({pp}) * cp({cp}) = {dp * tp * pp * cp} is not n_gpus={gpus}"
        )
    return gpus, {"dp": dp, "tp": tp, "pp": pp, "cp": cp}


def _batch(row: Row, stack: Stack, degrees: dict[str, int]) -> tuple[int, int, int]:
    """Micro-batch, number of micro-batches and global batch."""
    dp, pp = degrees["dp"], degrees["pp"]
    micro, count, batch = (row.count(key) for key in ("micro_batch", "num_microbatches", "global_batch"))
    if batch is None:
        if micro is None or count is None:
            raise RowError("global_batch is missing, and micro_batch and num_microbatches do not give it")
        batch = dp * micro * count
    if batch % dp:
        raise RowError(f"global_batch={batch} is not a multiple of dp={dp}")
    if micro is None and count is None:
        count = pp if stack.name.startswith("torchtitan") and pp > 1 else batch // dp
    if micro is None:
        micro = max(batch // (dp * (count or 1)), 1)
    if count is None:
        count = max(batch // (dp * micro), 1)
    if dp * micro * count != batch:
        raise RowError(
            f"dp({dp}) * micro_batch({micro}) * num_microbatches({count}) = {dp * micro * count} "
            f"is not global_batch={batch}"
        )
    return micro, count, batch


def _zero(row: Row, ranks: int) -> tuple[int, int]:
    """ZeRO stage, and the ranks that share a state (0: all of them).

    Args:
        ranks: dp * cp: context-parallel ranks hold the same weights, and share them too.
    """
    text = row.text("zero").lower()
    stage = row_digit(text)
    if stage is None:
        stage = 3 if re.search(r"fsdp|hsdp|full.?shard", text) else 1 if "distributed optim" in text else 0
    group = re.search(
        r"(?:shard(?:ing)? group|hsdp|hybrid\w*|fsdp)\D{0,12}(\d+)", text.replace("fsdp2", "fsdp")
    )
    shard = int(group[1]) if group else 0
    if ranks == 1 or stage == 0:
        return 0, 0
    return stage, 0 if shard >= ranks or ranks % max(shard, 1) else shard


def row_digit(text: str) -> int | None:
    """The ZeRO stage with which a text begins."""
    found = re.match(r"(?:zero-?|stage )?([0-3])\b", text)
    return int(found[1]) if found else None


def _recompute(row: Row) -> str:
    text = row.text("recompute").lower()
    if re.match(r"none|not stated|no\b|unknown|0|false|sequence-parallel only|$", text):
        return "none"
    if "2nd layer" in text or "every second" in text or "(op" in text or text == "op":
        return ALTERNATE
    if "selective" in text:
        return "selective"
    if re.match(r"full|yes|1|true|on\b|uniform|block|every", text):
        return "full"
    raise RowError(f"recompute={row.text('recompute')} must be none, selective or full")


def _sequence_parallel(row: Row, stack: Stack, tp: int) -> bool:
    text = row.text("sequence_parallel").lower()
    stated = (
        True if re.match(r"1|true|yes|on\b", text) else False if re.match(r"0|false|no\b|off", text) else None
    )
    return tp > 1 and (stack.sequence_parallel if stated is None else stated)


def _gauge(row: Row) -> str:
    text = f"{row.text('notes')} {row.text('how_read')}".lower()
    return ALLOCATED if ALLOCATED_WORDS.search(text) else DEVICE


def _lora_rank(row: Row) -> int:
    text = f"{row.text('model')} {row.text('notes')}".lower()
    if NOT_MODELLED.search(text):
        raise RowError("adapters on weights of 4 bits, or other than LoRA, are not in the cost model")
    return LORA_RANK if ADAPTERS.search(text) else 0


def _precision(row: Row) -> str:
    text = row.text("precision").lower()
    for narrow, words in (("nvfp4", r"fp4|float4"), ("mxfp8", r"mx-?fp8"), ("fp8", r"fp8|float8")):
        if re.search(words, text):
            return narrow
    found = re.search(r"bf16|bfloat16|fp16|float16|half|fp32|float32", text)
    if not found:
        if text and not text.startswith("not stated"):
            raise RowError(f"precision={row.text('precision')} must be bf16, fp16, fp32 or fp8")
        return "bf16"
    return {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32"}.get(found[0], found[0])


def _virtual_stages(row: Row, layers: int, pp: int) -> int:
    stated = row.count("vpp_chunks")
    text = row.text("vpp_chunks").lower()
    if pp == 1 or (stated is None and not re.search(r">\s*1|interleav", text)):
        return 1
    blocks = layers // pp
    return stated or next((v for v in range(2, blocks + 1) if layers % (pp * v) == 0), 2)


def _measured(row: Row, batch: int, seq_len: int, gpus: int) -> tuple[float | None, float | None]:
    """Seconds per iteration and bytes; at least one of them is there.

    Errors:
        RowError: the transcriber flagged the run, or nothing was measured.
    """
    flagged = FLAGGED.search(row.text("notes").lower())
    if flagged:
        raise RowError(f"flagged in the notes: {flagged[0]}")
    if row.text("notes").lower().startswith("relative"):
        raise RowError("a relative figure, not seconds or bytes")
    seconds, tokens, samples = (
        row.number(k) for k in ("iteration_s", "tokens_per_s_per_gpu", "samples_per_s")
    )
    if seconds is None and tokens is not None:
        seconds = batch * seq_len / (tokens * gpus)
    if seconds is None and samples is not None:
        seconds = batch / samples
    memory = row.number("memory_gb")
    if CHUNKED_LOSS.search(row.text("notes").lower()):
        memory = None
    if seconds is None and memory is None:
        memory_out = re.match(r"1|yes|true|oom", row.text("oom").lower())
        raise RowError(
            "out of memory: nothing was measured" if memory_out else "no seconds or memory measured"
        )
    return seconds, None if memory is None else memory * 2.0**30
