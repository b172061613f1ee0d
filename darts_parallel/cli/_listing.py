"""Lists of the files that ship, with sizes: `darts-parallel models`, `clusters`, `devices`, `trainers`."""

from collections.abc import Callable
from typing import Any

from omegaconf import OmegaConf

from darts_parallel.config import group_files, group_names, require
from darts_parallel.errors import closest

Entry = Any
"""Content of a file."""


def _model(entry: Entry) -> str:
    """Return layers, width and experts; files that read another file have none."""
    width = entry.get("hidden_size")
    if not isinstance(width, int):
        return "sizes of a file of your own"
    experts = f" · {entry['num_experts']} experts" if entry.get("num_experts") else ""
    return f"{entry['num_layers']} layers × {width:,}{experts} · {entry['max_seq_len']:,} tokens"


def _cluster(entry: Entry) -> str:
    nodes = (f"{group['count']} × {group['gpus']} {group['device']}" for group in entry["nodes"])
    return " + ".join(nodes)


def _device(entry: Entry) -> str:
    precision, peak = next(iter(entry["peak_TFLOPs"].items()))
    memory = f"{entry['memory_GiB']:g} GiB at {entry['memory_bandwidth_GBps']:,g} GB/s"
    return f"{memory} · {peak:,g} TFLOP/s {precision}"


SIZES: dict[str, Callable[[Entry], str]] = {
    "models": _model,
    "clusters": _cluster,
    "devices": _device,
}
LISTS = (*SIZES, "trainers")


def listing(name: str, *flags: str) -> list[str]:
    """Return a line for each file of a group: the word to write, and its sizes.

    Args:
        name: One of `LISTS`.
        flags: Of the command; a word that is none is refused.

    Errors:
        ConfigError: another word follows the name.
    """
    for word in flags:
        near = closest(word, group_names(name.removesuffix("s")))
        rule = "be one word, since it lists all"
        require(word.startswith("-"), f"{name} {word}", rule, f"{name}, which has {near}")
    lines = []
    for path in group_files(name.removesuffix("s")):
        text = path.read_text(encoding="utf-8")
        if name in SIZES:
            words = SIZES[name](OmegaConf.create(text))
        else:
            _, head, *_ = text.splitlines()
            words = head.removeprefix("# ")
        lines.append(f"{path.stem:<24}{words}")
    return lines
