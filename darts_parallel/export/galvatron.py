"""Hetu-Galvatron: the JSON of its runtime, which takes a strategy per layer.

Keys of version 3: `galvatron/core/runtime/hybrid_parallel_config.py`. A list stands for the blocks,
as text with commas; the embedding takes the stage of the first block, the head that of the last,
both `vtp`, `vcp` and `vocab_sdp`. `dp_types_enc` is 0 for `default_dp_type` (ddp or zero2) and 1
for ZeRO-3; ZeRO-1 does not exist there.
"""

import json
from collections.abc import Iterable

from darts_parallel.errors import Entries
from darts_parallel.export.common import Compared, Exported, Request
from darts_parallel.plans import LayerStrategy, legal_pipeline_degrees

DEFAULT_TYPE = {0: "ddp", 2: "zero2"}
OUTER_FIELDS = ("tp", "zero_stage")


def export(job: Request) -> Exported:
    """Write `galvatron.json`.

    Errors:
        UnsupportedError: Galvatron's runtime cannot express it.
    """
    _check_stages(job)
    _sequence_parallel(job)
    _default_type(job, _outer(job))
    job.settle()
    values = settings(job)
    notes = [
        f"precision and sizes are runtime arguments: {job.training.precision}, {job.model.name}"
    ]
    switch = "true" if _sequence_parallel(job) else "false"
    notes.append(
        f"sequence parallelism is no key of the file: set the runtime's sequence_parallel={switch}"
    )
    if job.plan.num_micro_batches > 1 and any(s.zero_stage > 1 for s in job.plan.layers):
        notes.append(
            "set the runtime's async_grad_reduce=false: by default (true) gradients stay whole until the "
            "last micro-batch, and ZeRO-2 and ZeRO-3 save no memory on them"
        )
    files = {"galvatron.json": json.dumps(values, indent=4) + "\n"}
    return Exported(files, tuple(notes))


def settings(job: Request) -> Entries:
    """Return the content of the JSON: lists of a number for every block, as text."""
    plan = job.plan
    blocks = job.blocks
    outer = _outer(job)
    values: Entries = {"pp_deg": plan.pp}
    values["tp_sizes_enc"] = _text(own.tp for own in blocks)
    values["tp_consecutive_flags"] = _text(1 for _ in blocks)
    values["cp_sizes_enc"] = _text(plan.cp for _ in blocks)
    values["dp_types_enc"] = _text(int(own.zero_stage == 3) for own in blocks)
    if job.problem.model.has_experts:  # its runtime takes 1 for missing degrees
        values["ep_sizes_enc"] = _text(own.ep for own in blocks)
        values["tp_of_ep_sizes_enc"] = _text(own.etp for own in blocks)
    values["use_sp"] = _text(0 for _ in blocks)
    values["checkpoint"] = _text(int(own.recompute == "full") for own in blocks)
    values["global_bsz"] = job.training.global_batch_size
    values["chunks"] = plan.num_micro_batches
    values["pp_division"] = _text(chunk.num_blocks for chunk in job.chunks)
    values["pipeline_type"] = "pipedream_flush"
    values["default_dp_type"] = _default_type(job, outer)
    values["vtp"] = outer.tp
    values["vsp"] = 0
    values["vcp"] = plan.cp
    values["vocab_sdp"] = int(outer.zero_stage == 3)
    return values


def _text(values: Iterable[int]) -> str:
    return ",".join(map(str, values))


def _outer(job: Request) -> LayerStrategy:
    """Return the strategy that embedding, head and loss share."""
    fields = {"embedding": OUTER_FIELDS, "head": OUTER_FIELDS, "loss": ("tp",)}
    rows = [
        Compared(layer.name, own, fields[layer.kind])
        for layer, own in job.pairs
        if layer.kind in fields
    ]
    return job.shared(rows, "vtp and vocab_sdp are one for both")


def _default_type(job: Request, outer: LayerStrategy) -> str:
    given = [job.facts(own) for own in dict.fromkeys([outer, *job.blocks])]
    stages = {own["zero_stage"] for own in given if own["copies"] > 1} - {1, 3}
    if len(stages) > 1:
        job.refuse(
            "zero_stage 0 and 2, and default_dp_type is one for all", "space.zero_stage=[2,3]"
        )
    return DEFAULT_TYPE.get(min(stages, default=0), "ddp")


def _check_stages(job: Request) -> None:
    for place, chunk in (("first", job.chunks[0]), ("last", job.chunks[-1])):
        if chunk.num_blocks:
            continue
        legal = legal_pipeline_degrees(job.problem.model, job.problem.cluster)
        below = [pp for pp in legal if pp < job.plan.pp]
        fewer = max(below, default=job.plan.pp)
        job.refuse(
            f"the {place} stage holds no block, and its embedding and head go with the outermost blocks",
            f"space.pp={fewer}",
        )
        return


def _sequence_parallel(job: Request) -> bool:
    """Return whether tensor-parallel layers divide the sequence: a switch of the runtime."""
    flags = {strategy.sequence_parallel for strategy in job.plan.layers if strategy.tp > 1}
    if len(flags) > 1:
        job.refuse(
            "sequence_parallel is true for some layers and false for others, but its switch is one for all",
            "space.sequence_parallel=true",
        )
    return flags == {True}
