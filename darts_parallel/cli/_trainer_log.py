"""Read a trainer's log: seconds of a step, peak memory, and whose batch it was."""

import re
from statistics import median

from darts_parallel.errors import ConfigError, read_text
from darts_parallel.problem import GIB, Problem

WARMUP, LEAST = 5, 3
"""Steps left out at the beginning, half of the log at most, and printed steps that a log must have."""
NUMBER = r"(\d[\d.,]*(?:e[+-]?\d+)?)"
TITAN = r"(?<!validate )step: +\d+ .*?"
STEPS = {
    "Megatron": (rf"elapsed time per iteration \(ms\): {NUMBER}", "ms"),
    "NeMo": (rf"train_step_timing in s[:=] ?{NUMBER}", "s"),
    "torchtitan": (rf"{TITAN}tps: {NUMBER}", "tokens/s/GPU"),
    "DeepSpeed": (rf"CurrSamplesPerSec={NUMBER}", "sequences/s"),
}
"""Line of a step, and the unit of its number, by trainer; the first one that a log has counts."""
PEAKS = {
    rf"\| max allocated: .*?max reserved: {NUMBER}": 2.0**20,
    rf"peak_memory_usage[:=] ?{NUMBER}": 1.0,
    rf"{TITAN}memory: *{NUMBER}GiB": GIB,
    rf"MaxMemAllocated={NUMBER}GB": GIB,
}
"""Lines of the allocator's peak, of what it reserved where that is printed, and bytes of their unit."""
BATCHES = {
    r"global[_ ]batch[_ ]size:? +(\d+)": "sequences",
    r"train_batch_size \.+ (\d+)": "sequences",
    r"(\d+) tokens per train step": "tokens",
}
"""Lines of the global batch, and its unit."""


def read_log(path: str, problem: Problem) -> tuple[float, float | None, str]:
    """Return median seconds of a plan's steps, the allocator's peak bytes, and a sentence of both.

    Errors:
        ConfigError: the log cannot be read, or holds no steps, or those of another batch.
    """
    try:
        text = re.sub(r"\x1b\[[\d;]*m", "", read_text(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"tune.log={path} cannot be read ({error}); try a trainer's output."
        ) from None
    found = ((name, unit, _numbers(line, text)) for name, (line, unit) in STEPS.items())
    trainer, unit, steps = next((own for own in found if own[2]), ("", "", []))
    if len(steps) < LEAST:
        who = f"steps of {', '.join(STEPS)}, and holds {len(steps)}"
        raise ConfigError(
            f"tune.log={path} must hold at least {LEAST} {who}; try the whole output of a run."
        )
    batch, tokens = problem.training.global_batch_size, problem.tokens_per_iteration
    for line, kind in BATCHES.items():
        printed, own = _numbers(line, text)[-1:], batch if kind == "sequences" else tokens
        if printed not in ([], [own]):
            told = f"its global batch is {printed[0]:.0f} {kind}, the plan's {own}"
            raise ConfigError(
                f"tune.log={path} is of another job: {told}; try the log of this plan's run."
            )
    left_out = min(WARMUP, len(steps) // 2)
    value = max(median(steps[left_out:]), 1e-12)
    rates = {
        "tokens/s/GPU": tokens / problem.cluster.num_devices / value,
        "sequences/s": batch / value,
    }
    seconds = rates.get(unit, value * (1e-3 if unit == "ms" else 1.0))
    peak = max(
        (size * own for line, size in PEAKS.items() for own in _numbers(line, text)), default=None
    )
    memory = "no memory" if peak is None else f"peak {peak / GIB:.2f} GiB"
    counted = f"median of {len(steps) - left_out} steps ({left_out} of warm-up left out)"
    return seconds, peak, f"{trainer}'s log: {seconds:.4g} s, {counted}, {memory}"


def _numbers(line: str, text: str) -> list[float]:
    """Read the numbers of all lines as trainers print them: `6,260`, `1.073e+04`."""
    return [float(number.replace(",", "").rstrip(".")) for number in re.findall(line, text)]
