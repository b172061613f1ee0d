"""Measure the machine at hand, and write a device and a cluster for the search.

    darts-parallel profile                                               # one process, one device
    torchrun --nproc-per-node 2 -m darts_parallel profile seconds=60     # one process a device
    darts-parallel --config-dir outputs/measured cluster=measured model=gpt2_xl

Every process measures its own device at the same time (matrix products by shape, memory streams,
attention, launches); then the processes of a node, and those of equal place on
all nodes, time all-reduce, all-gather and messages by size (nccl on GPUs, gloo on CPUs). Seconds
are those of torch.utils.benchmark, medians over the processes. It writes `device/NAME.yaml`,
`cluster/NAME.yaml` and `profile.json` (every measurement) into `out`, and prints the first two, which
say how far the fits are from the measurements. It was run on CPUs alone, never on a GPU.
"""

from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from math import inf
from pathlib import Path

import torch

from darts_parallel.config import check_fields, one_of, ranged, require, run_main
from darts_parallel.errors import Entries
from darts_parallel.machine._compute import DTYPES, measure_compute
from darts_parallel.machine._files import Profile, cluster_yaml, device_yaml, node_memory
from darts_parallel.machine._links import measure_link
from darts_parallel.machine._timing import this_machine
from darts_parallel.plans import write_json, write_text

COMPUTE_SHARE = 0.6
"""Share of the seconds for one device's kernels, where there are links to measure as well."""


@dataclass
class ProfileOptions:
    """Command line of `darts-parallel profile`."""

    out: str = "outputs/measured"
    """A folder for `--config-dir`."""
    name: str = "measured"
    device: str = one_of("auto", ("auto", "cpu", "cuda"))
    """`cpu`, `cuda`, or `auto`: cuda where there is one."""
    seconds: float = ranged(60.0, 0, inf)
    """Wall-clock of the measurements; each is repeated three times at least."""
    precisions: list[str] | None = one_of(None, tuple(DTYPES))
    """Precisions of products, the main one first; null: fp32 on a CPU, bf16, fp16 and fp32 on a
    GPU."""
    largest: int | None = ranged(None, 64, inf)
    """Rows and columns of the largest product; null: 1024 on a CPU, 8192 on a GPU."""
    largest_message_mib: float = ranged(16.0, 1e-3, inf)
    """In 2^20 bytes."""

    def __post_init__(self) -> None:
        check_fields("", self)
        require(self.precisions != [], "precisions=[]", "list at least one", "[fp32]")
        rule = "be letters, digits and underscores, since files and keys are called so"
        require(self.name.isidentifier(), f"name={self.name}", rule, "measured")

    @property
    def on_gpu(self) -> bool:
        """Whether a GPU is measured.

        Errors:
            ConfigError: a GPU is asked for and there is none.
        """
        found = torch.cuda.is_available()
        asked = self.device == "cuda"
        require(found or not asked, "device=cuda", "be there, and torch finds none", "cpu")
        return found and self.device != "cpu"


def run(options: ProfileOptions) -> int:
    """Measure on all ranks, write on the first."""
    on_gpu = options.on_gpu
    precisions = options.precisions or (["bf16", "fp16", "fp32"] if on_gpu else ["fp32"])
    largest = options.largest or (8192 if on_gpu else 1024)
    message = int(options.largest_message_mib * 2**20)
    folder = Path(options.out)
    for part in ("device", "cluster"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    with this_machine("cuda" if on_gpu else "cpu") as machine:
        seconds = options.seconds * (1.0 if machine.world == 1 else COMPUTE_SHARE)
        compute = measure_compute(machine, precisions, largest, seconds)
        rest = (options.seconds - seconds) / 2
        links = [
            measure_link(machine, inside=inside, largest=message, seconds=rest)
            for inside in (True, False)
        ]
        if machine.rank == 0:
            when = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
            profile = Profile(options.name, machine, compute, links, when)
            _write(folder, profile)
    return 0


def _write(folder: Path, profile: Profile) -> None:
    """Write the files; print the device's and the cluster's file, and how to use them."""
    device = device_yaml(profile, node_memory(profile.machine))
    for part, text in (("device", device), ("cluster", cluster_yaml(profile))):
        write_text(folder / f"{part}/{profile.name}.yaml", text)
        print(text)
    gemms = [asdict(entry) for entry in profile.compute.gemms]
    page: Entries = {"when": profile.when, "gemms": gemms}
    for place, link in zip(("intra_node", "inter_node"), profile.links, strict=True):
        page[place] = link and asdict(link)
    write_json(folder / "profile.json", page)
    peaks = profile.compute.peaks
    usable = ""
    if "bf16" not in peaks:
        usable = f" model=bert_345m training.precision={next(iter(peaks))}"
    print(f"use: darts-parallel --config-dir {folder} cluster={profile.name}{usable}")


def main() -> int:
    """Measure as the arguments of this process say; return the exit status."""
    return run_main("darts-parallel profile", run)
