"""How much faster is dynamic context parallelism, next to what its authors printed?

    python -m experiments.dynamic_cp                # about 2 minutes

Packing at a fixed degree (`dp_balanced`) and dynamic context parallelism are priced over the same
draws, with the degrees and the budget of the printed runs.
"""

import csv
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import exp
from pathlib import Path
from statistics import NormalDist

from darts_parallel.config import DYNAMIC, PACKED, run_main
from darts_parallel.planner import plan_lengths
from darts_parallel.problem import load_problem
from darts_parallel.report import markdown_table
from experiments.study import Report, Study, StudyOptions, run_study

HISTOGRAMS = Path(__file__).parent / "data/packed_lengths.csv"
VERL = "verl PR 6555"
VERL_RATIO = 337.16 / 209.97
VERL_JOB = (
    "model=qwen3_30b_a3b",
    "cluster=h100_1x8",
    "training.seq_len=16384",
    "training.global_batch_size=256",
    "training.max_seqlen_per_dp_cp_rank=4096",
    "space.ep=8",
    "space.recompute=full",
)
"""Degrees and budget as printed; GPUs, their number, batch and recomputation are assumed."""
MEGATRON = "Megatron-LM PR 5123"
MEGATRON_RATIOS = {4: 1.285, 8: 1.412, 16: 1.212, 32: 1.375, 64: 1.495}
"""Ratio of trimmed mean seconds by GPUs, from the README of the benchmark."""
MEGATRON_JOB = (
    "model=gpt2_xl",
    "model.num_layers=12",
    "model.hidden_size=2048",
    "model.num_heads=16",
    "model.vocab_size=131072",
    "model.max_seq_len=8192",
    "cluster.nodes.0.gpus=4",
    "training.seq_len=8192",
    "training.max_seqlen_per_dp_cp_rank=2048",
)
"""Model, degrees, batch and budget as printed; only the GPU is assumed."""
DEGREES = ("training=any", "space=uniform", "space.tp=1", "space.pp=1", "space.cp=4")


@dataclass(frozen=True)
class PrintedRun:
    """A printed run, and the job that stands for it."""

    source: str
    name: str
    measured: float
    """Printed speed of dynamic context parallelism over that of the fixed degree."""
    words: tuple[str, ...]
    counts: dict[int, float]
    """Histogram of lengths."""


@dataclass(frozen=True)
class PricedRun:
    """A case and its predicted seconds."""

    source: str
    name: str
    measured: float
    fixed_s: float
    dynamic_s: float
    ratio: float
    bound_ratio: float
    """Ratio that no packing of the sequences exceeds."""
    cpu_s: float
    """Processor seconds until all plans are found."""


def histograms() -> dict[str, dict[int, float]]:
    """Return the histograms that were fixed before pricing: counts of lengths, by name."""
    found: dict[str, dict[int, float]] = defaultdict(dict)
    with HISTOGRAMS.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            found[row["histogram"]][int(row["length"])] = float(row["count"])
    return found


def write_lengths(folder: Path, counts: Mapping[int, float]) -> Path:
    """Write a file for `training.lengths`."""
    file = folder / "lengths.csv"
    lines = [f"{length},{count}" for length, count in counts.items()]
    file.write_text("\n".join(["length,count", *lines]) + "\n", encoding="utf-8")
    return file


def cases() -> Iterator[PrintedRun]:
    """Yield all cases."""
    for name, counts in histograms().items():
        for nodes in (1, 4):
            job = (*VERL_JOB, f"cluster.nodes.0.count={nodes}")
            yield PrintedRun(VERL, f"{name}, {8 * nodes} H100", VERL_RATIO, job, counts)
    for cluster in ("h100_1x8", "gb200_nvl72"):
        for gpus, ratio in MEGATRON_RATIOS.items():
            pins = (f"cluster={cluster}", f"cluster.nodes.0.count={gpus // 4}")
            # 8 sequences for each of dp = gpus / 4 ranks
            batch = f"training.global_batch_size={2 * gpus}"
            name = f"{gpus} GPUs as in {cluster}"
            words = (*MEGATRON_JOB, *pins, batch)
            yield PrintedRun(MEGATRON, name, ratio, words, lognormal_counts())


def lognormal_counts() -> dict[int, float]:
    """Return the benchmark's lengths: lognormal of mean 1024 and sigma 1.5, clipped to 128 and 8192."""
    sigma = 1.5
    sizes = range(128, 8193, 128)
    middle = NormalDist().inv_cdf
    counts = dict.fromkeys(sizes, 0.0)
    for draw in range(10_000):
        z = middle((draw + 0.5) / 10_000)
        length = 1024 * exp(sigma * z - sigma**2 / 2)
        counts[min(max(128, round(length / 128) * 128), 8192)] += 1.0
    return {length: count for length, count in counts.items() if count}


def price(case: PrintedRun) -> list[PricedRun]:
    """Price both packings of a case."""
    with tempfile.TemporaryDirectory() as folder:
        file = write_lengths(Path(folder), case.counts)
        problem = load_problem([*case.words, *DEGREES, f"training.lengths={file}"])
        began = time.process_time()
        plans = plan_lengths(problem, []).plans
        took = time.process_time() - began
    best = {}
    for scheduler in (PACKED, DYNAMIC):
        rows = [own for own in plans if own.packing.scheduler == scheduler]
        best[scheduler] = min(rows, key=lambda own: own.seconds)
    fixed = best[PACKED].seconds[0]
    dynamic = best[DYNAMIC].seconds[0]
    bound = fixed / best[DYNAMIC].bound
    ratio = fixed / dynamic
    row = PricedRun(case.source, case.name, case.measured, fixed, dynamic, ratio, bound, took)
    return [row]


def report(rows: Sequence[PricedRun]) -> Report:
    """Put the ratios next to the printed ones."""
    head = ("source", "case", "printed", "priced", "at most", "fixed", "dynamic", "CPU")
    lines = []
    for row in rows:
        ratios = [f"{value:.2f}" for value in (row.measured, row.ratio, row.bound_ratio)]
        seconds = [f"{value:.3g} s" for value in (row.fixed_s, row.dynamic_s, row.cpu_s)]
        lines.append((row.source, row.name, *ratios, *seconds))
    note = (
        "Printed and priced: speed of dynamic context parallelism over that of packing at cp 4, with the "
        "same budget of a rank. At most: what perfect packing on the same ranks would reach."
    )
    return Report(note, markdown_table(head, lines, left=(0, 1)))


def run(options: StudyOptions) -> int:
    """Price all cases; returns the exit status."""
    study = Study(
        "dynamic_cp",
        "How much faster is dynamic context parallelism, next to what its authors printed?",
        "the lengths, GPUs and batch of verl's run, which its PR does not print (three histograms were fixed "
        "before pricing); the GPU of Megatron-LM's benchmark, whose steps of 0.2 s hold costs that no price "
        "here has; PR 7097, which prints no seconds.",
        price,
        report,
    )
    return run_study(study, {f"{own.source}, {own.name}": own for own in cases()}, options)


if __name__ == "__main__":
    raise SystemExit(run_main("experiments.dynamic_cp", __doc__, StudyOptions, run))
