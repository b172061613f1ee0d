"""Logs in the trainers' own formats: steps, peaks and batches are read, those of other jobs are refused."""

import time
from pathlib import Path

import pytest

from darts_parallel.cli._trainer_log import _by_rank, read_log
from darts_parallel.errors import ConfigError
from darts_parallel.problem.problem import load_problem

LINES = (
    " [2025-03-01 10:00:01.5] iteration {n:8d}/     100 | elapsed time per iteration (ms): {ms:.1f} | "
    "global batch size:  4096 |\n[Rank 0] (after {n} iterations) memory (MB) | allocated: 1.00 | "
    "max allocated: 1024.00 | reserved: 9.00 | max reserved: 2048.00\n",
    "Training epoch 0, iteration {n}/49 | lr: 7.496e-06 | global_batch_size: 4096 | global_step: {n} | "
    "peak_memory_usage: 2147483648 | reduced_train_loss: 11.96 | train_step_timing in s: {s:.4g} | val: 6\n",
    "[titan] 2025-12-14 05:55:38,070 - root - INFO - \x1b[31mstep: {n:2}  \x1b[32mloss:  9.9  \x1b[36mmemory:"
    "  2.00GiB(2.50%)  \x1b[34mtps: {tps:,}  tflops: 295.72  mfu: 29.90%\x1b[0m\n"
    "[titan] root - INFO - validate step: {n:2}  loss:  9.9  memory: 99.00GiB(83.03%)  tps: 1\n",
    "[2024-07-17 19:53:24,981] [INFO] [timer.py:258:stop] epoch=0/micro_step={n}/global_step={n}, RunningAvg"
    "SamplesPerSec=1.0, CurrSamplesPerSec={rate!r}, MemAllocated=0.02GB, MaxMemAllocated=2.0GB\n",
    "mbs: 4 | grad_accum: 8 | cp: 1 | sequence_length: 64 | global_batch_size: 4096 | train_steps: 9\n"
    "[INFO|DP=0|PP=0|TP=0]: iteration: {n} / 9 | time_per_iteration_ms: {s:.3g}K | tokens_per_sec: 9K |\n"
    " Memory usage: 1.00MiB. Peak allocated 1024.00MiB. Peak reserved: 2048.00MiB\n",
    "| Iteration: {n:6d} | Consumed samples:         4096 | Elapsed time per iteration (ms): {ms:.1f} | "
    "Learning rate: 1.000000e-04 |\n\tMax memory: 2048.00 MB\tCurrent memory : 1024.00 MB\n",
)
OTHER = LINES[3].format(n=1, rate=4.0) * 9 + "train_batch_size ............. 24"
STEPS = (30.0, 2.0, 2.0, 2.0, 1.0, 1.0, 1.625, 1.75, 40.0)


@pytest.mark.parametrize("line", LINES)
def test_a_log_says_median_seconds_and_the_peak(line: str, tmp_path: Path) -> None:
    problem = load_problem(
        ["model=toy", "cluster=toy", "training=toy", "training.global_batch_size=4096"]
    )
    tokens = problem.tokens_per_iteration / problem.cluster.num_devices
    rows = ({"n": n, "s": s, "ms": 1e3 * s, "tps": round(tokens / s)} for n, s in enumerate(STEPS))
    (tmp_path / "log").write_text("".join(line.format(rate=4096 / row["s"], **row) for row in rows))
    seconds, peak, _, said = read_log(str(tmp_path / "log"), problem)
    assert (seconds, peak) == (pytest.approx(1.625, rel=0.01), 2**31)
    assert "median of 5 steps (4 of warm-up left out), peak 2.00 GiB" in said
    for text, words in (("", "at least 3 steps"), (OTHER, "24 sequences")):
        (tmp_path / "log").write_text(text)
        with pytest.raises(ConfigError, match=words):
            read_log(str(tmp_path / "log"), problem)


@pytest.mark.parametrize(
    ("times", "seconds"), [(("11.5K",) * 4, 11.5), (("45", "41.2", "39.4", "43.2"), 0.0413)]
)
def test_nanotrons_milliseconds_have_a_k_above_a_second(
    times: tuple[str, ...], seconds: float, tmp_path: Path
) -> None:
    """Lines of huggingface/nanotron#390 (11.5K, 22.8K tokens/s) and of its pull request 23 (45 ms)."""
    problem = load_problem(["model=toy", "cluster=toy", "training=toy"])
    line = (
        "iteration: 1 / 9 | consumed_tokens: 85.8G | elapsed_time_per_iteration_ms: {} | lr: 1e-05"
    )
    (tmp_path / "log").write_text("\n".join(line.format(time) for time in times))
    assert read_log(str(tmp_path / "log"), problem).seconds == pytest.approx(seconds)


@pytest.mark.parametrize(
    "head",
    [
        "seq_length ............ {}",
        "sequence length: {}, total steps: 9",
        "sequence length {},",
        "cp: 1 | sequence_length: {} |",
    ],
)
def test_a_log_of_other_sequences_is_refused(head: str, tmp_path: Path) -> None:
    problem = load_problem(["model=toy", "cluster=toy", "gbs=4096", "training=toy"])
    steps = "\n" + "".join(LINES[2].format(n=n, tps=1000) for n in range(9))
    (tmp_path / "log").write_text(head.format(64) + steps)
    assert read_log(str(tmp_path / "log"), problem).peak == 2**31
    (tmp_path / "log").write_text(head.format(32) + steps)
    with pytest.raises(ConfigError, match="must have sequences of 64 tokens, as the plan"):
        read_log(str(tmp_path / "log"), problem)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "latin-1"])
def test_a_log_may_have_broken_bytes_and_ends_of_lines_of_windows(
    encoding: str, tmp_path: Path
) -> None:
    problem = load_problem(["model=toy", "cluster=toy", "gbs=4096", "training=toy"])
    lines = ["Gerät 0"] + [LINES[0].format(n=n, ms=1000.0 * s) for n, s in enumerate(STEPS)]
    (tmp_path / "log").write_bytes("\r\n".join(lines).encode(encoding))
    assert read_log(str(tmp_path / "log"), problem)[:2] == (pytest.approx(1.625), 2**31)


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("6,260", [6260.0]),
        ("1.073e+04", [1.073e4]),
        ("1,234,567.5", [1234567.5]),
        ("12.3.4", []),
        ("1,5", []),
        ("12,34", []),
        ("27.", [27.0]),
        ("3, 4", [3.0]),
    ],
)
def test_numbers_are_read_as_trainers_print_them(text: str, numbers: list[float]) -> None:
    found = _by_rank("value: NUMBER", f"value: {text} |")
    assert [number for number, _ in found] == numbers


def test_a_log_of_two_runs_is_refused(tmp_path: Path) -> None:
    problem = load_problem(["model=toy", "cluster=toy", "training=toy"])
    own = problem.training.global_batch_size
    steps = LINES[3].format(n=1, rate=4.0) * 9
    text = f"train_batch_size ..... {own}\n{steps}train_batch_size ..... {2 * own}\n{steps}"
    (tmp_path / "log").write_text(text)
    with pytest.raises(ConfigError, match=f"global batches of {own} and {2 * own} sequences"):
        read_log(str(tmp_path / "log"), problem)


def test_the_rate_of_an_older_torchtitan_and_a_long_log_are_read(tmp_path: Path) -> None:
    problem = load_problem(["model=toy", "cluster=toy", "training=toy"])
    tokens = problem.tokens_per_iteration / problem.cluster.num_devices
    line = f"step: 10  loss:  1.5  memory: 2.00GiB(3%)  wps: {round(tokens / 0.002):,}  mfu: 1%\n"
    long = "nothing\n" * 1_000_000 + 9 * line
    (tmp_path / "log").write_text(long)
    seconds, peak, _, _ = read_log(str(tmp_path / "log"), problem)
    assert (seconds, peak) == (pytest.approx(0.002, rel=0.01), 2**31)
    # a run of digits is read once, not from each of its digits on
    (tmp_path / "log").write_text("1" * 100_000 + "\n" + 9 * line)
    begin = time.process_time()
    assert read_log(str(tmp_path / "log"), problem).seconds == seconds
    assert time.process_time() - begin < 2.0
    # the batch is printed at the beginning
    (tmp_path / "log").write_text(f"global batch size: 3\n{long}")
    with pytest.raises(ConfigError, match="3 sequences"):
        read_log(str(tmp_path / "log"), problem)


@pytest.mark.parametrize(
    ("label", "ranks"),
    [("[rank0]", [0, 8]), ("[rank9]", [9]), ("[Rank 0]", [0]), ("", [*range(16)])],
)
def test_steps_of_one_rank_count_and_the_peak_has_its_ranks(
    label: str, ranks: list[int], tmp_path: Path
) -> None:
    problem = load_problem(["model=llama3_8b", "cluster=h100_8x8", "cluster.nodes.0.count=2"])
    line = "{}: step: {}  loss:  1.5  memory: {}.00GiB(3%)  tps: {}  mfu: 1%\n"
    steps = [line.format(label, n, 3, 100) + line.format("[rank5]", n, 2, 900) for n in range(9)]
    if not label:
        steps = steps[:1] + [line.format("", n, 3, 100) for n in range(9)]
    (tmp_path / "log").write_text("".join(steps))
    run = read_log(str(tmp_path / "log"), problem)
    assert [*run.ranks] == ranks
    assert "median of 5 steps" in run.said
    assert run.seconds == pytest.approx(problem.tokens_per_iteration / 16 / 100)
