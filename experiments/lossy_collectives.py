"""Does an all-reduce at few bits save time on this machine's processes, and as much as predicted?

    python -m experiments.lossy_collectives [sizes=[65536,1048576]] [repeats=5]

Four gloo processes reduce float32 numbers exactly and at 8, 4 and 2 bits (`darts_parallel.run.lossy`); next
to the medians stand the bytes of one all-reduce on the wire as the cost model counts them.
"""

import os
from dataclasses import dataclass, field

from darts_parallel.config.checks import MAX_PROCESSES, require_at_least, require_at_most
from darts_parallel.config.options import run_main
from darts_parallel.cost.collectives import LOSSLESS, transmitted_bits
from darts_parallel.plan.file import write_text
from darts_parallel.report.tables import markdown_table
from darts_parallel.run.lossy import time_all_reduce
from darts_parallel.run.workers import Workers
from experiments.results_page import publish, result_folder

EXACT_BITS = 32
"""Bits of a float32 number, which an exact all-reduce sends here."""


@dataclass
class CollectiveOptions:
    """Command line of `python -m experiments.lossy_collectives`."""

    sizes: list[int] = field(default_factory=lambda: [16_384, 262_144, 1_048_576])
    bits: list[int] = field(default_factory=lambda: [16, 8, 4, 2])
    processes: int = 4
    repeats: int = 5
    out: str = "outputs/lossy_collectives"
    publish: bool = False

    def __post_init__(self) -> None:
        require_at_most("processes", self.processes, MAX_PROCESSES)
        require_at_least("processes", self.processes, 2)
        require_at_least("repeats", self.repeats, 1)


def run(options: CollectiveOptions) -> int:
    """Measure all sizes and bits, and write one table."""
    header = ("numbers", "bits", "measured ms", "ratio to exact", "ratio of bytes")
    lines = []
    with Workers(options.processes, timeout_s=120.0) as workers:
        for size in options.sizes:
            exact = max(workers.run(time_all_reduce, size, LOSSLESS, options.repeats))
            for bits in options.bits:
                lossy = bits < LOSSLESS
                seconds = max(workers.run(time_all_reduce, size, bits, options.repeats)) if lossy else exact
                wire = (transmitted_bits(bits) if lossy else EXACT_BITS) / EXACT_BITS
                lines.append((f"{size:,}", f"{bits if lossy else 'exact'}", f"{1e3 * seconds:.2f}",
                         f"{seconds / exact:.2f}", f"{wire:.3f}"))  # fmt: skip
    load = f"load average {os.getloadavg()[0]:.0f} on {os.cpu_count()} CPUs"
    text = (
        f"Medians of {options.repeats}, the slowest of {options.processes} processes of one machine, whose "
        f"memory is the network; {load}.\n\n"
    ) + "\n".join(markdown_table(header, lines))
    folder = result_folder(options.out)
    write_text(folder / "table.md", text + "\n")
    print(text)
    if options.publish:
        command = "python -m experiments.lossy_collectives"
        publish("lossy_collectives", "Does an all-reduce at few bits save time here?", command, text)
    return 0


if __name__ == "__main__":
    raise SystemExit(run_main("experiments.lossy_collectives", __doc__, CollectiveOptions, run))
