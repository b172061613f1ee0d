import csv
import json
from pathlib import Path

import pytest

from darts_parallel.bilevel import job
from darts_parallel.bilevel.loop import BilevelPlan
from darts_parallel.bilevel.report import COLUMNS, rows_of
from darts_parallel.bilevel.retrain import retrain
from darts_parallel.bilevel.tracking import BilevelTracker
from darts_parallel.config.bilevel import ARMS
from darts_parallel.cost.evaluation import evaluate
from darts_parallel.plan.strategy import Plan
from darts_parallel.problem.problem import load_problem
from experiments import bilevel
from experiments.bilevel import main
from tests.support.bilevel_tiny import OVERRIDES, corpus, tiny_search
from tests.support.commands import Command

ARGUMENTS = [*OVERRIDES[1:], "bilevel.retrain_steps=16", "bilevel.seeds=[0,1]"]


@pytest.fixture(autouse=True)
def small_corpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands read the tests' corpus instead of the whole library."""
    for module in (bilevel, job):
        monkeypatch.setattr(module, "load_corpus", corpus)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inside TensorBoard
def test_the_experiment_writes_a_row_for_each_arm_and_seed_and_runs_no_seed_twice(tmp_path: Path) -> None:
    main([*ARGUMENTS, f"folder={tmp_path}"])
    with (tmp_path / "bilevel.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == COLUMNS
    assert {(row["arm"], row["seed"]) for row in rows} == {(arm, seed) for arm in ARMS for seed in "01"}
    seconds = {row["arm"]: float(row["seconds_per_step"]) for row in rows if row["seed"] == "0"}
    assert seconds["time_only"] == min(seconds.values())
    assert seconds["random_equal_time"] == pytest.approx(seconds["bilevel"], rel=0.05)
    assert "bilevel against" in (tmp_path / "report.md").read_text(encoding="utf-8")
    assert list((tmp_path / "tensorboard").rglob("events*"))
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.json")}
    main([*ARGUMENTS, f"folder={tmp_path}"])
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.json")}


def test_a_folder_of_other_settings_ends_with_one_sentence_and_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = [*OVERRIDES[1:], "bilevel.seeds=[0]", "bilevel.arms=[all_16_bit]", f"folder={tmp_path}"]
    main([*common, "output.tensorboard=false"])
    for change in ("bilevel.learning_rate=0.01", "cluster=fast_network"):
        with pytest.raises(SystemExit) as stopped:
            main([*common, change])
        assert stopped.value.code == 2
        assert "nearest legal: another folder" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inside TensorBoard
def test_the_command_searches_retrains_and_writes_a_plan_with_bits(tmp_path: Path, command: Command) -> None:
    arms = "bilevel.arms=[bilevel,all_16_bit]"
    overrides = [*OVERRIDES, "bilevel.seeds=[0]", arms, f"hydra.run.dir={tmp_path}"]
    done = command(*overrides)
    assert done.status == 0, done.err
    data = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))
    plan = Plan.from_dict(data)
    assert {layer.tp_comm_bits for layer in plan.layers[1:-2]} <= {16, 8, 4, 2}
    assert {layer.tp_comm_bits for layer in (plan.layers[0], *plan.layers[-2:])} == {16}
    cost = evaluate(plan, load_problem(OVERRIDES))
    assert cost.iteration_time_s == pytest.approx(data["predicted"]["iteration_time_s"], rel=1e-12)
    assert (tmp_path / "bilevel.csv").is_file()
    assert "time to target" in done.out


def test_steps_to_target_follow_the_references_exchange_rate() -> None:
    def run(loss: float) -> dict[str, object]:
        return {"validation_loss": loss, "seconds_per_step": 0.5, "nats_per_efold": 0.35}

    runs = {"all_16_bit": run(2.0), "all_4_bit": run(2.35)}
    data = {"seed": 3, "settings": {"retrain_steps": 400}, "runs": runs}
    reference, other = rows_of(data)
    assert reference["steps_to_target"] == pytest.approx(400)
    assert other["steps_to_target"] == pytest.approx(400 * 2.718281828)
    assert other["time_to_target_s"] == pytest.approx(200 * 2.718281828)


def test_retraining_follows_from_plan_and_seed_alone() -> None:
    search = tiny_search()
    plan = BilevelPlan((search.choices.candidates[5],) * 2, 8)
    first, again, other = (retrain(plan, search.settings, corpus(), seed) for seed in (0, 0, 1))
    assert first == again
    assert first != other


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inside TensorBoard
def test_both_parts_of_every_logits_gradient_are_curves(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    search = tiny_search()
    tracker = BilevelTracker(tmp_path, search.choices, search.settings.batches)
    search.run(tracker.record)
    tracker.close()
    events = EventAccumulator(str(tmp_path), size_guidance={"scalars": 0})
    events.Reload()
    tags = set(events.Tags()["scalars"])
    assert {"loss/train", "loss/validation", "search/entropy", "search/seconds_per_step"} <= tags
    assert {"search/temperature", "search/hard_seconds_per_step", "outer/global_batch_8"} <= tags
    assert {"trial_log_steps/dp8_g4", "trial_log_steps/tp2_b4", "strategy/tp2_b16_g4"} <= tags
    for candidate in search.choices.candidates:
        name = candidate.label().replace(" ", "_")
        assert {f"gradient_{part}/block_1/{name}" for part in ("loss", "time")} <= tags
