"""Read a trainer's log: seconds of a step, peak memory, and whose batch it was."""

import re
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from darts_parallel.config import EXPORTS, TrainerLog, read_trainer, require
from darts_parallel.errors import ConfigError, read_text
from darts_parallel.problem import GIB, Problem

WARMUP = 5
"""Steps left out at the beginning, half of the log at most."""
LEAST = 3
"""Printed steps that a log must have."""
NUMBER = r"((?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:e[+-]?\d+)?)(?![\d]|[.,]\d)"
"""A number as trainers print it; commas stand before groups of three digits alone."""
RANK = re.compile(r"\[(r|R)ank ?(\d+)\]")
"""Who printed a line: torchrun counts `[rank3]` within a node, Megatron `[Rank 3]` in the job."""
LENGTH = r"\b(?:seq_length|sequence[_ ]length):?[ .]+(\d+)"
"""Tokens of a sequence as Megatron, torchtitan and nanotron print them before the first step."""
UNREAD = re.compile(r"\x1b\[[\d;]*m|\0")
"""Colours, and every second byte of UTF-16, which PowerShell writes."""
MOST = 1e12
"""Largest measurement, and the inverse of the smallest, that is believed; a rate of 0 is a long step."""
SECONDS = {"s": 1.0, "ms": 1e-3}
"""Units of time in seconds; the other units are rates."""


class LogRun(NamedTuple):
    """Hold what a log says of its run."""

    seconds: float
    """Median of the steps."""
    peak: float | None
    """The allocator's largest peak, bytes."""
    ranks: Sequence[int]
    """Ranks one of which has the peak."""
    said: str
    """A sentence of all."""


def read_log(path: str, problem: Problem) -> LogRun:
    """Return what a log says. Of several ranks' steps those of the first one count.

    Errors:
        ConfigError: the log cannot be read, or holds no steps, or those of another batch.
    """
    try:
        text = UNREAD.sub("", read_text(path, "replace"))
    except OSError as error:
        raise ConfigError(
            f"tune.log={path} cannot be read ({error}); try a trainer's output."
        ) from None
    known = [log for name in EXPORTS for log in read_trainer(name).logs]
    # a step's own seconds count before a rate
    known.sort(key=lambda log: log.unit not in SECONDS)
    printed = [log for log in known if _by_rank(log.step, text)]
    found = _by_rank(printed[0].step, text) if printed else []
    steps = [value for value, label in found if label == found[0][1]]
    who = f"steps of {', '.join(log.name for log in known)}, and holds {len(steps)}"
    rule = f"hold at least {LEAST} {who}"
    near = "the whole output of a run, or tune.measured=FILE.csv for another trainer"
    require(len(steps) >= LEAST, f"tune.log={path}", rule, near)
    _check_batch(path, known, text, problem)
    left_out = min(WARMUP, len(steps) // 2)
    seconds = _seconds(median(steps[left_out:]), printed[0].unit, problem)
    peaks = [
        (log.memory_bytes * value, label)
        for log in known
        for value, label in _by_rank(log.memory, text)
    ]
    peak, label = max(peaks, default=(None, ""))
    memory = "no memory" if peak is None else f"peak {peak / GIB:.2f} GiB{label and f' of {label}'}"
    counted = f"median of {len(steps) - left_out} steps ({left_out} of warm-up left out)"
    said = f"{printed[0].name}'s log: {seconds:.4g} s, {counted}, {memory}"
    return LogRun(seconds, peak, _ranks(label, problem), said)


def _ranks(label: str, problem: Problem) -> Sequence[int]:
    """Return the ranks that may have printed a label of `RANK`; all without one."""
    ranks = range(problem.cluster.num_devices)
    found = RANK.match(label)
    if found is None or int(found[2]) not in ranks:
        return ranks
    rank = int(found[2])
    node = problem.cluster.groups[0].gpus
    within = rank < node and found[1] == "r"
    return ranks[rank::node] if within else [rank]


def _check_batch(path: str, known: Sequence[TrainerLog], text: str, problem: Problem) -> None:
    """Refuse the log of a run with another batch, or other sequences, where the log states them."""
    own = {"sequences": problem.training.global_batch_size, "tokens": problem.tokens_per_iteration}
    for log in known:
        unit = log.batch_unit
        batches = sorted({batch for batch, _ in _by_rank(log.batch, text)})
        several = " and ".join(f"{batch:.0f}" for batch in batches)
        rule = f"hold one run, and holds global batches of {several} {unit}"
        require(len(batches) < 2, f"tune.log={path}", rule, "the log of this plan's run alone")
        for printed in batches:
            if printed != own[unit]:
                told = f"its global batch is {printed:.0f} {unit}, the plan's {own[unit]}"
                raise ConfigError(
                    f"tune.log={path} is of another job: {told}; try the log of this plan's run."
                )
    lengths = _by_rank(LENGTH, text)
    require(
        not lengths or problem.training.seq_len in dict(lengths),
        f"tune.log={path}",
        f"have sequences of {problem.training.seq_len} tokens, as the plan",
        "the log of this plan's run",
    )


def _seconds(value: float, unit: str, problem: Problem) -> float:
    """Return seconds of a step that a log states in a unit."""
    value = min(max(value, 1.0 / MOST), MOST)
    if unit == "tokens/s/GPU":
        return problem.tokens_per_iteration / problem.cluster.num_devices / value
    if unit == "sequences/s":
        return problem.training.global_batch_size / value
    return value * SECONDS[unit]


def _by_rank(line: str, text: str) -> list[tuple[float, str]]:
    """Read the numbers of all lines as trainers print them: `6,260`, `1.073e+04`.

    Each has the label of `RANK` on its line; empty where it has none.
    """
    found = []
    for match in re.finditer(line.replace("NUMBER", NUMBER), text):
        begin = text.rfind("\n", 0, match.start()) + 1
        label = RANK.search(text, begin, match.end())
        found.append((float(match[1].replace(",", "")), label[0] if label else ""))
    return found
