"""torchtitan 0.2.2: the tables of its TOML file that the plan sets.

Names: `torchtitan/config/job_config.py` of the release. It is the last that reads such files, and
the last that recomputes every n-th block (`torchtitan/distributed/activation_checkpoint.py`).
"""

import json

from darts_parallel.errors import Entries
from darts_parallel.export.common import Exported, Request
from darts_parallel.export.torchtitan import (
    checked_strategy,
    mixed_precision,
    parallelism_fields,
    sizes,
)


def export(job: Request) -> Exported:
    """Write the file `torchtitan.toml`.

    Errors:
        UnsupportedError: torchtitan has no fields for it.
    """
    strategy = checked_strategy(job)
    training = job.training
    parallelism = parallelism_fields(job, strategy, head="output")
    del parallelism["enable_sequence_parallel"]  # its tensor parallelism is sequence parallel
    parallelism["enable_async_tensor_parallel"] = bool(training.tp_comm_overlap)
    size = job.micro_batch_size(strategy)
    local = size
    if job.plan.pp > 1:
        parallelism["pipeline_parallel_microbatch_size"] = size
        local *= job.plan.num_micro_batches
    batches = {
        "local_batch_size": local,
        "global_batch_size": training.global_batch_size,
        "seq_len": training.seq_len,
    }
    tables = {
        "parallelism": parallelism,
        "training": mixed_precision(job) | batches,
        "compile": {"enable": bool(training.compiled)},
        "activation_checkpoint": _recomputation(job),
    }
    texts = [job.headline() + "\n", *map(_table, tables.items())]
    note = f"give it a model of {sizes(job)}"
    return Exported({"torchtitan.toml": "\n".join(texts)}, (note,))


def _recomputation(job: Request) -> Entries:
    """Return the setting of all blocks, or of every n-th one.

    Its count of blocks goes on over the whole process, so every stage begins at 1.
    """
    if {own.recompute for own in job.blocks} != {"none", "full"}:
        return {"mode": job.recompute(), "selective_ac_option": "op"}
    places = [place for chunk in job.chunks for place in range(1, chunk.num_blocks + 1)]
    repeated = [own.recompute == "full" for own in job.blocks]
    period = min(place for place, own in zip(places, repeated, strict=True) if own)
    if job.plan.virtual_stages > 1 or repeated != [place % period == 0 for place in places]:
        job.refuse("recompute=full for some blocks, which are not every n-th of a stage")
    return {"mode": "selective", "selective_ac_option": str(period)}


def _table(entry: tuple[str, Entries]) -> str:
    """Write a table; JSON's lists, texts, numbers and flags are TOML's."""
    name, values = entry
    lines = [f"{key} = {json.dumps(value)}\n" for key, value in values.items()]
    return f"[{name}]\n{''.join(lines)}"
