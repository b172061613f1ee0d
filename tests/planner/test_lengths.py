"""Plans for sequences of many lengths: what they must share with the plain job, and with each other."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from darts_parallel.cost.evaluation import evaluate
from darts_parallel.errors import ConfigError, InfeasibleError
from darts_parallel.planner import lengths
from darts_parallel.planner.lengths import LengthPlan, plan_lengths, read_lengths
from darts_parallel.planner.prediction_intervals import out_of_memory
from darts_parallel.problem.problem import Problem, load_problem
from darts_parallel.schedules import find
from tests.support.commands import QUIET, Command

RANDOM = range(3)


def job(folder: Path, rows: dict[int, float], *more: str) -> Problem:
    lines = ["length,count", *(f"{length},{count}" for length, count in rows.items())]
    (folder / "lengths.csv").write_text("\n".join(lines) + "\n")
    words = [f"training.lengths={folder / 'lengths.csv'}", "model.max_seq_len=512"]
    return load_problem(["model=toy", "cluster=toy", *words, *more])


def random_job(folder: Path, seed: int, values: list[int], *more: str) -> Problem:
    """A toy job of random batch, memory, lengths and pins."""
    rng = np.random.default_rng(seed)
    rows = {length: float(rng.integers(1, 100)) for length in values}
    pins = [
        f"training.global_batch_size={8 * rng.integers(1, 5)}",
        f"search.seed={seed}",
        f"space.pp={rng.choice(['null', '2', '4'])}",
        f"cluster.devices.toy.memory_GiB={rng.choice([0.102, 0.5])}",
    ]
    return job(folder, rows, "training.seq_len=512", *pins, *more)


def found_of(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> dict[object, LengthPlan]:
    """All plans, by plan, whatever their place."""
    monkeypatch.setattr(lengths, "LISTED", 10_000)
    return {own.plan: own for own in plan_lengths(problem)}


@pytest.mark.parametrize("seed", RANDOM)
@pytest.mark.parametrize("packed", ["true", "false"])
def test_one_length_is_plain(
    tmp_path: Path, seed: int, packed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    length = [64, 128, 512][seed % 3]
    problem = random_job(tmp_path, seed, [length], f"training.packed={packed}")
    plain = replace(
        problem.config, training=replace(problem.training, lengths=None, seq_len=length)
    )
    usual, found = Problem.from_config(plain), found_of(problem, monkeypatch)
    assert len(found) > 3
    for plan, own in found.items():
        cost = evaluate(plan, usual)  # type: ignore[arg-type]
        assert cost.feasible
        assert own.seconds == pytest.approx((cost.iteration_time_s,) * 2, rel=1e-9)
        full = max(u / c for u, c in zip(cost.memory_bytes, cost.capacity_bytes, strict=True))
        assert own.memory == pytest.approx((full,) * 3, rel=1e-9)
        assert own.chance == pytest.approx(out_of_memory(own.plan, usual))
    assert min(own.seconds for own in found.values()) == next(iter(found.values())).seconds


@pytest.mark.parametrize("seed", RANDOM)
def test_padding_costs_seconds_and_memory(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = [32, 96, 256, 512] if seed % 2 else list(range(16, 512, 31))
    packed, padded = (
        found_of(random_job(tmp_path, seed, values, f"training.packed={word}"), monkeypatch)
        for word in ("true", "false")
    )
    both = set(packed) & set(padded)
    assert both
    for plan in both:
        less, more = packed[plan], padded[plan]
        pairs = zip((*less.seconds, *less.memory), (*more.seconds, *more.memory), strict=True)
        assert all(b >= a * (1.0 - 1e-9) for a, b in pairs)
        assert all(max(own.memory[:2]) <= own.memory[2] * (1.0 + 1e-9) for own in (less, more))


def test_a_packed_step_costs_the_mean_sequence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = ("cluster.nodes.0.count=1", "cluster.nodes.0.gpus=1", "training.seq_len=512")
    problem = job(tmp_path, {64: 3.0, 256: 1.0}, *alone, "training.global_batch_size=8")
    draws = np.random.default_rng(problem.config.search.seed).choice(
        2, (lengths.DRAWS, 8), p=[0.75, 0.25]
    )
    for plan, own in found_of(problem, monkeypatch).items():
        seconds = []
        for length in (64, 256):
            training = replace(problem.training, lengths=None, seq_len=length)
            cost = evaluate(plan, Problem.from_config(replace(problem.config, training=training)))  # type: ignore[arg-type]
            seconds.append(cost.iteration_time_s)
        expected = np.array(seconds)[draws].mean(1)
        assert own.seconds == pytest.approx(
            (expected.mean(), np.quantile(expected, lengths.QUANTILE))
        )


def test_the_path_through_unequal_micro_batches_is_that_of_1f1b() -> None:
    rng = np.random.default_rng(0)
    for stages, count in ((1, 3), (2, 5), (4, 3), (3, 7)):
        passes, last = rng.random((2, 1, count, 2, stages)), stages - 1
        ends, free = dict[object, list[float]](), [[0.0] * 2] * stages
        waiting = [list(order) for order in find("1f1b").orders(stages, count, 1)]
        while any(waiting):
            for k, row in enumerate(waiting):
                kind, _, i = row[0] if row else ("", 0, 0)
                giver = (
                    ("F", i, k - 1) if kind == "F" else ("B", i, k + 1) if k < last else ("F", i, k)
                )
                if row and (giver in ends or (kind == "F" and k == 0)):
                    begin = np.maximum(free[k], ends.get(giver, [0.0, 0.0]))
                    free[k] = ends[kind, i, k] = (
                        begin + passes["FB".index(kind), 0, i, :, k]
                    ).tolist()
                    row.pop(0)
        # one length for every micro-batch and rank
        weights = np.eye(2 * count).reshape(1, count, 2, 2 * count)
        costs = passes[:, 0].reshape(2, 2 * count, stages)
        found = lengths._path_seconds(weights, costs)
        assert found == pytest.approx([max(max(own) for own in free)])
        assert lengths._path_seconds(weights, costs, together=True)[0] >= found[0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no rows"),
        ("length,count\n", "has no rows"),
        ("len,count\n3,4\n", "has the row 3,4"),
        ("length,count\n8,1\n0,1\n", "has the row 0,1"),
        ("length,count\n600,1\n", "has the row 600,1"),
        ("length,count\n8,0\n", "has the row 8,0"),
        ("length,count\n8,nan\n", "8,nan"),
        ("length,count\n8.5,1\n", "8.5,1"),
        ("length,count\n8\n", "row 8,None"),
        (None, "cannot be read"),
    ],
)
def test_a_bad_file_is_one_sentence(tmp_path: Path, text: str | None, words: str) -> None:
    path = tmp_path / "bad.csv"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_lengths(str(path), 512)
    sentence = str(caught.value)
    assert sentence.startswith(
        f"training.lengths={path} must be a CSV file with the columns length (1 to "
    )
    assert words in sentence
    assert sentence.endswith("; try rows such as 512,100.")


def test_equal_lengths_count_together_and_no_memory_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "twice.csv").write_text("length,count,more\n8,1,x\n4,2,y\n8,1,z\n")
    found, shares = read_lengths(str(tmp_path / "twice.csv"), 8)
    assert found.tolist() == [4, 8]
    assert shares.tolist() == [0.5, 0.5]
    small = job(
        tmp_path, {512: 1.0}, "training.seq_len=512", "cluster.devices.toy.memory_GiB=0.1001"
    )
    with pytest.raises(InfeasibleError, match="no even uniform plan holds its longest micro-batch"):
        plan_lengths(small)
    with pytest.raises(ConfigError, match="must go with plans of 1F1B"):
        plan_lengths(job(tmp_path, {8: 1.0}, "cost.pipeline=simulated"))


def test_the_command_writes_the_best_plan_which_is_used_like_any_other(command: Command) -> None:
    (command.folder / "lengths.csv").write_text("length,count\n16,5\n64,1\n")
    done = command(
        "model=toy",
        "cluster=toy",
        "training=toy",
        "training.lengths=lengths.csv",
        *QUIET,
        "trainer=galvatron",
        "hydra.run.dir=own",
    )
    assert done.status == 0, done.err
    data = json.loads((command.folder / "own/plan.json").read_text())
    plans = data["lengths"]["plans"]
    assert data["lengths"]["packed"] is True
    assert [entry["seconds"] for entry in plans] == sorted(entry["seconds"] for entry in plans)
    assert all(entry["chance"] <= 0.2 for entry in plans)
    assert "own/plan.json export=galvatron" in done.out
    priced = command("own/plan.json", *QUIET, "hydra.run.dir=priced")
    assert "given plan, not searched" in priced.out, priced.err


def test_many_lengths_cost_nearly_what_all_of_them_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = {32 * n: 1.0 for n in range(1, 17)}
    problem = job(tmp_path, rows, "training.seq_len=512", "space.pp=1", "space.tp=1")
    few = {own.plan: own.seconds[0] for own in plan_lengths(problem)}
    monkeypatch.setattr(lengths, "LENGTHS", len(rows))
    assert few == pytest.approx(
        {own.plan: own.seconds[0] for own in plan_lengths(problem)}, rel=0.01
    )
