import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from darts_parallel.bilevel import command as bilevel_command
from darts_parallel.bilevel.candidates import Candidate
from darts_parallel.bilevel.jobs import Jobs
from darts_parallel.bilevel.loop import BilevelSearch
from darts_parallel.bilevel.report import COLUMNS, median_time, paired, sign_flip_p
from darts_parallel.bilevel.retraining.retrain import crossing, retrain, smoothed
from darts_parallel.config.bilevel import ARMS
from darts_parallel.cost.evaluation import evaluate
from darts_parallel.errors import ConfigError
from darts_parallel.plan.strategy import Plan
from darts_parallel.problem.problem import load_problem
from experiments import bilevel
from experiments.bilevel import main
from tests.support.bilevel_tiny import OVERRIDES, corpus, tiny_settings
from tests.support.commands import Command

ARGUMENTS = [
    *OVERRIDES[1:], "bilevel.seeds=[0]", "bilevel.retrain_seeds=1", "bilevel.random_plans=1",
    "space.num_micro_batches=1",
]  # fmt: skip


@pytest.fixture(autouse=True)
def small_corpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands read the tests' corpus instead of the whole library."""
    for module in (bilevel, bilevel_command):
        monkeypatch.setattr(module, "load_corpus", corpus)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inside TensorBoard
def test_the_experiment_writes_a_row_for_each_training_and_runs_no_seed_twice_nor_with_other_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main([*ARGUMENTS, f"folder={tmp_path}"])
    with (tmp_path / "bilevel.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == COLUMNS
    assert {(row["arm"], row["seed"]) for row in rows} == {(arm, "0") for arm in ARMS}
    seconds = {row["arm"]: float(row["seconds_per_step"]) for row in rows}
    assert seconds["time_only"] == min(seconds.values())
    assert seconds["all_4_bit"] <= seconds["best_uniform"] <= seconds["all_16_bit"]
    spent = {row["arm"]: float(row["search_steps"]) for row in rows}
    assert spent["all_16_bit"] == spent["time_only"] == 0.0 < spent["trials_only"] < spent["bilevel"]
    assert spent["best_uniform"] > 0.0
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "bilevel against" in text
    assert "weight steps, trials included" in text
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.json")}
    main([*ARGUMENTS, f"folder={tmp_path}"])
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.json")}
    for change in ("bilevel.learning_rate=0.01", "cluster=fast_network"):
        with pytest.raises(ConfigError, match="nearest legal: another folder"):
            main([*ARGUMENTS, f"folder={tmp_path}", change])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inside TensorBoard
def test_the_command_chooses_a_whole_plan_that_is_searched_and_verified(
    tmp_path: Path, command: Command
) -> None:
    done = command(*OVERRIDES, "bilevel.arms=[bilevel]", f"hydra.run.dir={tmp_path}")
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
    assert sorted(path.name for path in (tmp_path / "tensorboard").iterdir() if path.is_dir()) == ["seed-0"]


def test_ctrl_c_keeps_what_is_done_and_says_how_to_go_on(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C after the search of a seed, then after the seed, then no more."""
    arguments = [*OVERRIDES, "bilevel.seeds=[0,1]", "bilevel.arms=[bilevel]", f"hydra.run.dir={tmp_path}"]
    arguments += ["output.tensorboard=false", "space.num_micro_batches=1", "bilevel.num_steps=8",
                  "bilevel.trial_steps=4"]  # fmt: skip
    real, first_seed = Jobs.map, tmp_path / "seed-0.json"
    for after in ("search", "first seed"):
        calls = list[int]()

        def interrupted(
            self: Jobs, function: Any, jobs: Any, *rest: Any, after: str = after, calls: list[int] = calls
        ) -> Any:
            calls.append(1)
            # a seed has trials, references and arms
            if first_seed.is_file() if after == "first seed" else len(calls) == 2:
                raise KeyboardInterrupt
            return real(self, function, jobs, *rest)

        monkeypatch.setattr(Jobs, "map", interrupted)
        done = command(*arguments)
        assert done.status == 0
        assert f"hydra.run.dir={tmp_path} goes on" in done.err
        assert (tmp_path / "plan.json").is_file()
        assert first_seed.is_file() == (after == "first seed")
    monkeypatch.setattr(Jobs, "map", real)
    written = first_seed.stat().st_mtime_ns
    done = command(*arguments)
    assert done.status == 0, done.err
    assert first_seed.stat().st_mtime_ns == written
    assert (tmp_path / "seed-1.json").is_file()
    with (tmp_path / "bilevel.csv").open(encoding="utf-8") as file:
        rows = [(row["seed"], row["retrain_seed"]) for row in csv.DictReader(file)]
    assert {seed for seed, _ in rows} == {"0", "1"}
    assert len({retrained for _, retrained in rows}) == 2  # each seed has its own, and no search used them
    assert {retrained for _, retrained in rows}.isdisjoint({"0", "1"})


def test_ctrl_c_in_the_search_keeps_its_checkpoint(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [*OVERRIDES, "bilevel.num_steps=24", "bilevel.arms=[bilevel]", f"hydra.run.dir={tmp_path}"]
    arguments += ["output.tensorboard=false", "space.num_micro_batches=1"]
    real = BilevelSearch.step

    def interrupted(self: BilevelSearch) -> Any:
        if self.trainer.step == 22:
            raise KeyboardInterrupt
        return real(self)

    monkeypatch.setattr(BilevelSearch, "step", interrupted)
    done = command(*arguments)
    assert done.status == 2
    assert "interrupted; no seed is finished" in done.err
    started = list[int]()

    def interrupted_again(self: BilevelSearch) -> Any:
        started.append(self.trainer.step)
        raise KeyboardInterrupt

    monkeypatch.setattr(BilevelSearch, "step", interrupted_again)
    assert command(*arguments).status == 2
    assert started == [20]


def test_steps_to_target_are_those_of_the_first_crossing_of_the_smoothed_curve() -> None:
    curve = ((10, 3.0), (20, 2.0), (40, 1.0), (80, 1.0))
    assert smoothed(curve) == ((10, 3.0), (20, 2.5), (40, 2.0), (80, pytest.approx(4 / 3)))
    assert crossing(curve, 1.5) == pytest.approx(20 * 2**0.5)
    assert crossing(curve, 3.5) == pytest.approx(10)
    assert crossing(curve, 0.5) is None


def test_retraining_follows_from_plan_and_seed_alone_and_stops_at_its_target() -> None:
    settings, plan = tiny_settings(), (Candidate(2, 4, 4, 4),) * 2
    first, again, other = (retrain(plan, 8, settings, corpus(), seed, None) for seed in (0, 0, 1))
    assert first == again
    assert first != other
    assert len(first.training) == settings.retrain_steps
    soon = retrain(plan, 8, settings, corpus(), 0, first.test[0][1])
    assert soon.test == first.test[: len(soon.test)]
    assert len(soon.training) < settings.retrain_steps
    never = retrain(plan, 8, settings, corpus(), 0, 0.0)
    assert len(never.training) == int(settings.retrain_steps * settings.retrain_factor)
    assert never.steps_to(0.0) is None


def test_the_paired_test_is_exact_for_few_pairs_and_calls_equal_arms_equal() -> None:
    assert sign_flip_p([0.1, 0.2, 0.3]) == pytest.approx(2 / 8)
    assert sign_flip_p([0.1, -0.1]) == 1.0
    assert sign_flip_p([0.0] * 4) == 1.0
    assert sign_flip_p([]) == 1.0
    assert sign_flip_p([0.1] * 20) < 0.01
    assert sign_flip_p(torch.randn(30, generator=torch.Generator().manual_seed(0)).tolist()) > 0.05


def test_ties_are_counted_as_ties() -> None:
    def row(arm: str, seed: int, time: float) -> dict[str, Any]:
        return {"arm": arm, "seed": 0, "retrain_seed": seed, "test_loss": 2.0, "time_to_target_s": time}

    rows = [
        row("bilevel", 0, 1.0),
        row("all_16_bit", 0, 1.0),
        row("bilevel", 1, 1.0),
        row("all_16_bit", 1, 2.0),
    ]
    assert "| 1, 1, 0 |" in paired(rows)
    data = [{"runs": [{**{name: None for name in COLUMNS}, **own} for own in rows]}]
    assert median_time(data, "all_16_bit") == 1.5
