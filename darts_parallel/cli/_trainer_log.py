"""Read a trainer's log: seconds of a step, peak memory, and whose batch it was."""

import re
from collections.abc import Sequence
from statistics import median

from darts_parallel.config import EXPORTS, TrainerLog, read_trainer, require
from darts_parallel.errors import ConfigError, read_text
from darts_parallel.problem import GIB, Problem

WARMUP = 5
"""Steps left out at the beginning, half of the log at most."""
LEAST = 3
"""Printed steps that a log must have."""
NUMBER = r"((?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:e[+-]?\d+)?)(?![\d]|[.,]\d)"
"""A number as trainers print it; commas stand before groups of three digits alone."""
LONGEST_LOG = 2**23
"""Characters of a log that are read; of a longer one the beginning and the end."""
COLOURS = re.compile(r"\x1b\[[\d;]*m")
SECONDS = {"s": 1.0, "ms": 1e-3}
"""Units of time in seconds; the other units are rates."""


def read_log(path: str, problem: Problem) -> tuple[float, float | None, str]:
    """Return median seconds of a plan's steps, the allocator's peak bytes, and a sentence of both.

    Errors:
        ConfigError: the log cannot be read, or holds no steps, or those of another batch.
    """
    try:
        text = COLOURS.sub("", _without_middle(read_text(path)))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"tune.log={path} cannot be read ({error}); try a trainer's output."
        ) from None
    known = [log for name in EXPORTS for log in read_trainer(name).logs]
    # a step's own seconds count before a rate
    known.sort(key=lambda log: log.unit not in SECONDS)
    printed = [log for log in known if _numbers(log.step, text)]
    steps = _numbers(printed[0].step, text) if printed else []
    who = f"steps of {', '.join(log.name for log in known)}, and holds {len(steps)}"
    rule = f"hold at least {LEAST} {who}"
    require(len(steps) >= LEAST, f"tune.log={path}", rule, "the whole output of a run")
    _check_batch(path, known, text, problem)
    left_out = min(WARMUP, len(steps) // 2)
    seconds = _seconds(median(steps[left_out:]), printed[0].unit, problem)
    peaks = [log.memory_bytes * own for log in known for own in _numbers(log.memory, text)]
    peak = max(peaks, default=None)
    memory = "no memory" if peak is None else f"peak {peak / GIB:.2f} GiB"
    counted = f"median of {len(steps) - left_out} steps ({left_out} of warm-up left out)"
    return seconds, peak, f"{printed[0].name}'s log: {seconds:.4g} s, {counted}, {memory}"


def _check_batch(path: str, known: Sequence[TrainerLog], text: str, problem: Problem) -> None:
    """Refuse the log of a run with another global batch, where the log states it."""
    own = {"sequences": problem.training.global_batch_size, "tokens": problem.tokens_per_iteration}
    for log in known:
        unit = log.batch_unit
        batches = sorted(set(_numbers(log.batch, text)))
        if len(batches) > 1:
            several = " and ".join(f"{batch:.0f}" for batch in batches)
            rule = f"hold one run, and holds global batches of {several} {unit}"
            require(False, f"tune.log={path}", rule, "the log of this plan's run alone")
        for printed in batches:
            if printed != own[unit]:
                told = f"its global batch is {printed:.0f} {unit}, the plan's {own[unit]}"
                way_out = "try the log of this plan's run"
                raise ConfigError(f"tune.log={path} is of another job: {told}; {way_out}.")


def _seconds(value: float, unit: str, problem: Problem) -> float:
    """Return seconds of a step that a log states in a unit."""
    value = max(value, 1e-12)
    if unit == "tokens/s/GPU":
        return problem.tokens_per_iteration / problem.cluster.num_devices / value
    if unit == "sequences/s":
        return problem.training.global_batch_size / value
    return value * SECONDS[unit]


def _numbers(line: str, text: str) -> list[float]:
    """Read the numbers of all lines as trainers print them: `6,260`, `1.073e+04`."""
    found = re.findall(line.replace("NUMBER", NUMBER), text)
    return [float(number.replace(",", "")) for number in found]


def _without_middle(text: str) -> str:
    """Return a log of bearable length: the batch stands at its beginning, steady steps at its end."""
    if len(text) <= LONGEST_LOG:
        return text
    return f"{text[: LONGEST_LOG // 8]}\n{text[-LONGEST_LOG * 7 // 8 :]}"
