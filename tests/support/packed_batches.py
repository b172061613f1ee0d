"""Record how Megatron-LM's own schedulers pack 1,000 random batches.

    MEGATRON=FOLDER python -m tests.support.packed_batches

FOLDER is a checkout of Megatron-LM that has `DefaultDynamicCPScheduler`: branch `dev`, at d48bd6be
in the shipped file. The result, `tests/golden/packed_batches.json.gz`, is what
`darts_parallel/planner/sequence_packing.py` must give.
"""

import gzip
import json
import os
import sys
import typing
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import typing_extensions

COUNT = 1_000
FILE = Path("tests/golden/packed_batches.json.gz")


def random_batch(seed: int) -> dict[str, Any]:
    """Return random lengths for random ranks; every other batch is packed at a fixed cp."""
    rng = np.random.default_rng(seed)
    dp, cp = (2 ** rng.integers(0, 4, 2)).tolist()
    batch: dict[str, Any] = {"dp": dp, "cp": cp}
    most = cp
    if seed % 2:
        most = dp * cp
        sizes = [size for size in (1, 2, 4, 8, 16, 32, 64) if size <= most]
        batch["min_cp"] = int(rng.choice(sizes))
    batch["budget"] = int(rng.integers(16, 4096))
    longest = batch["budget"] * int(rng.integers(1, most + 1))
    count = dp * int(rng.integers(1, 2 + 64 // dp))
    lengths = rng.lognormal(np.log(longest / 6), 1.0, count)
    if rng.random() < 0.5:
        lengths = rng.uniform(1, longest + 1, count)
    # multiples of the unit are often equal
    unit = int(rng.choice([1, 100]))
    lengths = lengths // unit * unit
    batch["lengths"] = lengths.clip(1, longest).astype(int).tolist()
    return batch


def groups_of(batch: dict[str, Any], schedule: Any) -> list[list[Any]]:
    """Return the groups of every micro-batch, `[ranks, sequences]`, in order of ranks."""
    given = (batch["budget"], batch["cp"], batch["dp"], None)
    scheduler = schedule.DpBalancedScheduler(*given)
    if "min_cp" in batch:
        scheduler = schedule.DefaultDynamicCPScheduler(*given, min_cp_size=batch["min_cp"])
    pairs = list(enumerate(batch["lengths"]))
    waves = []
    for wave in scheduler.get_groups_and_subsamples(pairs):
        waves.append([[len(list(same)), own] for own, same in groupby(wave)])
    return waves


def main() -> None:
    """Write the file."""
    sys.path.insert(0, os.environ["MEGATRON"])
    if not hasattr(typing, "override"):  # Megatron-LM is written for Python 3.12
        typing.override = typing_extensions.override
    from megatron.core import __version__
    from megatron.core.datasets import data_schedule

    batches = [random_batch(seed) for seed in range(COUNT)]
    for batch in batches:
        batch["waves"] = groups_of(batch, data_schedule)
    text = json.dumps({"megatron_core": __version__, "batches": batches}, separators=(",", ":"))
    FILE.write_bytes(gzip.compress(text.encode(), mtime=0))


if __name__ == "__main__":
    main()
