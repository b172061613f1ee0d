import csv
import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from darts_parallel.bilevel import protocol
from darts_parallel.bilevel.jobs import Jobs
from darts_parallel.bilevel.joint_space import Candidate
from darts_parallel.bilevel.loop import BilevelSearch
from darts_parallel.bilevel.report import COLUMNS, median_time
from darts_parallel.bilevel.retrain import Retrained, Training, crossing, retrain, smoothed
from darts_parallel.cost.evaluation import evaluate
from darts_parallel.errors import ConfigError
from darts_parallel.plans.strategy import Plan
from darts_parallel.problem.problem import load_problem
from experiments import bilevel
from experiments.bilevel import main, paired
from tests.support.bilevel_tiny import OVERRIDES, corpus, tiny_settings
from tests.support.commands import Command

VARIANTS = {
    "bilevel",
    "raw",
    "all_16_bit",
    "best_uniform",
    "time_only",
    "random_equal_time",
    "sensitivity_greedy",
}
ARGUMENTS = [
    *OVERRIDES[1:],
    "bilevel.seeds=[0]",
    "bilevel.retrain_seeds=1",
    "random_plans=1",
    "space.num_micro_batches=1",
]


@pytest.fixture(autouse=True)
def small_corpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands read the tests' corpus instead of the whole library."""
    for module in (bilevel, protocol):
        monkeypatch.setattr(module, "load_corpus", corpus)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inside TensorBoard
def test_the_experiment_writes_a_row_for_each_training_and_runs_no_seed_twice_nor_with_other_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main([*ARGUMENTS, f"folder={tmp_path}"])
    with (tmp_path / "bilevel.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == COLUMNS
    assert {(row["variant"], row["seed"]) for row in rows} == {(name, "0") for name in VARIANTS}
    seconds = {row["variant"]: float(row["seconds_per_step"]) for row in rows}
    assert seconds["time_only"] == min(seconds.values())
    assert seconds["best_uniform"] <= seconds["all_16_bit"]
    spent = {row["variant"]: float(row["search_steps"]) for row in rows}
    assert spent["all_16_bit"] == spent["time_only"] == 0.0 < spent["bilevel"]
    assert spent["best_uniform"] > 0.0
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "bilevel against" in capsys.readouterr().out
    assert "weight steps, trials included" in text
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.json")}
    main([*ARGUMENTS, f"folder={tmp_path}"])
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.json")}
    for change in ("bilevel.learning_rate=0.01", "cluster=fast_network"):
        with pytest.raises(ConfigError, match="try another folder"):
            main([*ARGUMENTS, f"folder={tmp_path}", change])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inside TensorBoard
def test_the_command_chooses_a_plan_that_is_searched_and_verified(
    tmp_path: Path, command: Command
) -> None:
    done = command(*OVERRIDES, "bilevel.variants=[bilevel]", f"hydra.run.dir={tmp_path}")
    assert done.status == 0, done.err
    data = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))
    plan = Plan.from_dict(data)
    assert {layer.tp_comm_bits for layer in (plan.layers[0], *plan.layers[-2:])} == {16}
    cost = evaluate(plan, load_problem(OVERRIDES))
    assert cost.iteration_time_s == pytest.approx(data["predicted"]["iteration_time_s"], rel=1e-12)
    assert data["search"]["method"] == "bilevel"
    assert data["search"]["raw_iteration_time_s"] > 0.0
    assert set(data["verification"]) == {"exhaustive", "dynamic_programming"}
    assert data["verification"]["dynamic_programming"]["gap"] == pytest.approx(0.0, abs=1e-9)
    assert "time to target" in done.out
    assert "search, 12 of 12" in done.out  # progress without a terminal
    assert sorted(path.name for path in (tmp_path / "tensorboard").iterdir() if path.is_dir()) == [
        "seed-0"
    ]
    for folder in (tmp_path / "tensorboard/seed-0", tmp_path / "tensorboard"):
        run = EventAccumulator(str(folder)).Reload()
        tags = run.Tags()
        assert any(tag.startswith("probability/layer_0/") for tag in tags["scalars"])
        assert {"search/entropy", "search/memory_violation"} <= set(tags["scalars"])
        assert "probability/all_layers" in tags["images"]
        single = [tag for tag in tags["scalars"] if len(run.Scalars(tag)) == 1]
        assert {tag.split("/")[0] for tag in single} <= {"z_results"}


def interrupting(real: Callable[..., Any], due: Callable[..., bool]) -> Callable[..., Any]:
    """Wrap a method: Ctrl-C in its place where it is due."""

    def interrupted(*arguments: Any) -> Any:
        if due(*arguments):
            signal.raise_signal(signal.SIGINT)
        return real(*arguments)

    return interrupted


@pytest.fixture
def listens() -> Iterator[None]:
    """Jobs in the background of a shell ignore Ctrl-C."""
    earlier = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, earlier)


@pytest.mark.usefixtures("listens")
def test_ctrl_c_keeps_what_is_done(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the retraining of the second seed, then no more."""
    arguments = [
        *OVERRIDES,
        "bilevel.seeds=[0,1]",
        "bilevel.variants=[bilevel]",
        f"hydra.run.dir={tmp_path}",
    ]
    arguments += [
        "output.tensorboard=false",
        "space.num_micro_batches=1",
        "bilevel.num_steps=8",
        "bilevel.trial_steps=4",
    ]
    real, first_seed, calls = Jobs.map, tmp_path / "seed-0.json", list[bool]()

    def due(*job: Any) -> bool:
        calls.append(first_seed.is_file())
        return sum(calls) == 2  # a seed has trials, references and variants

    monkeypatch.setattr(Jobs, "map", interrupting(real, due))
    done = command(*arguments)
    assert done.status == 0
    assert "finished: seed 0; plan.json is the best plan so far" in done.err
    assert f"hydra.run.dir={tmp_path} runs what is left" in done.err
    assert (tmp_path / "plan.json").is_file()
    assert not (tmp_path / "seed-1.json").is_file()
    monkeypatch.setattr(Jobs, "map", real)
    written = first_seed.stat().st_mtime_ns
    done = command(*arguments)
    assert done.status == 0, done.err
    assert first_seed.stat().st_mtime_ns == written
    assert (tmp_path / "seed-1.json").is_file()
    with (tmp_path / "bilevel.csv").open(encoding="utf-8") as file:
        rows = [(row["seed"], row["retrain_seed"]) for row in csv.DictReader(file)]
    assert {seed for seed, _ in rows} == {"0", "1"}
    assert (
        len({retrained for _, retrained in rows}) == 2
    )  # each seed has its own, and no search used them
    assert {retrained for _, retrained in rows}.isdisjoint({"0", "1"})


@pytest.mark.usefixtures("listens")
@pytest.mark.parametrize(
    ("step", "bits"), [(2, {16}), (10, {16, 4})], ids=["before prices", "with prices"]
)
def test_ctrl_c_in_the_search_leaves_the_best_plan_of_what_is_known(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch, step: int, bits: set[int]
) -> None:
    arguments = [*OVERRIDES, "bilevel.variants=[bilevel]", f"hydra.run.dir={tmp_path}"]
    arguments += ["output.tensorboard=false", "space.num_micro_batches=1"]
    due = lambda search: search.trainer.step == step  # noqa: E731
    monkeypatch.setattr(BilevelSearch, "step", interrupting(BilevelSearch.step, due))
    done = command(*arguments)
    assert done.status == 0, done.err
    assert "interrupted; no seed is finished; plan.json is the best plan so far" in done.err
    data = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))
    assert data["search"]["stopped_by"] == "user"
    assert data["search"]["steps"] == step
    plan = Plan.from_dict(data)
    assert {layer.grad_comm_bits for layer in plan.layers} | {
        la.tp_comm_bits for la in plan.layers
    } <= bits
    cost = evaluate(plan, load_problem(OVERRIDES))
    assert cost.feasible
    assert cost.iteration_time_s == pytest.approx(data["predicted"]["iteration_time_s"], rel=1e-12)


def test_steps_to_target_are_those_of_the_first_crossing_of_the_smoothed_curve() -> None:
    curve = ((10, 3.0), (20, 2.0), (40, 1.0), (80, 1.0))
    assert smoothed(curve) == ((10, 3.0), (20, 2.5), (40, 2.0), (80, pytest.approx(4 / 3)))
    assert crossing(curve, 1.5) == pytest.approx(20 * 2**0.5)
    assert crossing(curve, 3.5) == pytest.approx(10)
    assert crossing(curve, 0.5) is None


def test_retraining_follows_from_plan_and_seed_alone_and_stops_at_its_target() -> None:
    settings, plan = tiny_settings(), (Candidate(2, 4, 4, 4),) * 2

    def curves(seed: int, target: float | None) -> Retrained:
        return retrain(Training(plan, 8, seed, target), settings, corpus())

    first, again, other = curves(0, None), curves(0, None), curves(1, None)
    assert first == again
    assert first != other
    assert len(first.training) == settings.retrain_steps
    soon = curves(0, first.test[0][1])
    assert soon.test == first.test[: len(soon.test)]
    assert len(soon.training) < settings.retrain_steps
    never = curves(0, 0.0)
    assert len(never.training) == int(settings.retrain_steps * settings.retrain_factor)
    assert never.steps_to(0.0) is None


def test_the_paired_test_counts_ties_as_ties_and_is_exact_for_few_pairs() -> None:
    def row(variant: str, seed: int, time: float) -> dict[str, Any]:
        return {
            "variant": variant,
            "seed": 0,
            "retrain_seed": seed,
            "test_loss": 2.0,
            "time_to_target_s": time,
        }

    rows = [
        row("bilevel", 0, 1.0),
        row("all_16_bit", 0, 1.0),
        row("bilevel", 1, 1.0),
        row("all_16_bit", 1, 2.0),
    ]
    assert "| 1, 1, 0 | 1.000 |" in paired(rows)
    data = [{"runs": [{**{name: None for name in COLUMNS}, **own} for own in rows]}]
    assert median_time(data, "all_16_bit") == 1.5
    three = [
        row(name, seed, 1.0 + (name == "raw") * seed)
        for name in ("bilevel", "raw")
        for seed in (1, 2, 3)
    ]
    assert "| 3, 0, 0 | 0.250 |" in paired(three)
