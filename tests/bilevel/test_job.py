import json
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import exp, inf
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from darts_parallel.bilevel import job
from darts_parallel.bilevel.job import (
    REFERENCE,
    SCHEDULE,
    compared,
    judged,
    time_table,
    times,
)
from darts_parallel.bilevel.loop import BilevelLoop, BilevelRecord, TrainingPhase
from darts_parallel.bilevel.retrain import Retrained, Retraining
from darts_parallel.bilevel.trials import Trials
from darts_parallel.cost.evaluation import evaluate
from darts_parallel.plans.strategy import Plan
from darts_parallel.problem.problem import load_problem
from experiments import bilevel
from experiments.bilevel import CONTROLS, greedy, main, paired, plan_lines
from tests.support.bilevel_tiny import OVERRIDES, corpus, tiny_loop
from tests.support.commands import Command


@pytest.fixture(autouse=True)
def small_corpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands read the tests' corpus instead of the whole library."""
    for module in (bilevel, job):
        monkeypatch.setattr(module, "load_corpus", corpus)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inside TensorBoard
def test_the_command_chooses_a_plan_that_is_searched_verified_judged_and_shown_meanwhile(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = watched_curves(tmp_path, monkeypatch)
    batches = ["bilevel.batch_candidates=[8,16]", f"hydra.run.dir={tmp_path}"]
    done = command(*OVERRIDES, *batches)
    assert done.status == 0, done.err
    require_curves(watched)
    data = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))
    plan = Plan.from_dict(data)
    assert {layer.tp_comm_bits for layer in (plan.layers[0], *plan.layers[-2:])} == {16}
    batch = data["training"]["global_batch_size"]
    here = load_problem([*OVERRIDES, f"training.global_batch_size={batch}"])
    cost = evaluate(plan, here)
    assert cost.iteration_time_s == pytest.approx(data["predicted"]["iteration_time_s"], rel=1e-12)
    assert data["search"]["method"] == "bilevel"
    assert set(data["verification"]) == {"exhaustive", "dynamic_programming"}
    assert data["verification"]["dynamic_programming"]["gap"] == pytest.approx(0.0, abs=1e-9)
    programme = data["verification"]["dynamic_programming"]
    assert programme["proven"]
    assert programme["lower_bound_s"] == pytest.approx(programme["iteration_time_s"])
    assert programme["iteration_time_s"] == pytest.approx(cost.iteration_time_s)
    phases = data["training_phases"]
    assert phases[0]["from_step"] == 0
    assert phases[-1]["global_batch_size"] == batch
    assert Plan.from_dict(phases[-1]["plan"]).layers == plan.layers
    assert set(data["time_to_target_s"]) == {
        SCHEDULE,
        REFERENCE,
        "batch 8",
        "batch 16",
        "best_constant_batch",
    }
    assert "fits: " in done.out
    assert "optimal in the model (layerwise" in done.out
    assert "Predicted time to the target loss" in done.out
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    for title in (
        "Schedule",
        "Phases of the training",
        "Predicted time to the target loss",
        "Probabilities by step of the logits",
    ):
        assert f"<h2>{title}</h2>" in page
    assert "steps trained" in " ".join(page.split())  # the training goes on behind the target
    # steps 0 to 5 of the logits, and the names of what is chosen
    for cell in ("step\n0", "step\n5", "batch 16", "pp 2", f"tensorboard --logdir {tmp_path}"):
        assert page.count(cell) == 1 or not cell.startswith("step"), cell
        assert cell in page
    assert "0 plans or parts" not in page
    assert "greedy by sensitivity): python -m experiments.bilevel" in done.out
    assert "loop, 12 of 12" in done.out  # progress without a terminal
    run = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    tags = run.Tags()
    scalars = set(tags["scalars"])
    assert any(tag.startswith("probability/layer_0/") for tag in scalars)
    wanted = {"loss/train", "loss/validation", "search/noise_scale_sequences", "search/entropy"}
    wanted |= {"probability_of/batch_8", "probability_of/batch_16", "probability_of/pp_2"}
    assert wanted <= scalars
    assert {f"retrain/{SCHEDULE}", f"retrain/{REFERENCE}"} <= scalars
    assert "probability/all_layers" in tags["images"]


def watched_curves(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[int, float]]:
    """Return what TensorBoard shows before the last step of a loop: step and value of every scalar."""
    found: dict[str, tuple[int, float]] = {}
    real = BilevelLoop.step

    def watched(loop: BilevelLoop) -> BilevelRecord:
        """Read the file before the last step, as TensorBoard does."""
        if loop.trainer.step == loop.settings.num_steps - 1:
            run = EventAccumulator(str(folder / "tensorboard")).Reload()
            for tag in run.Tags()["scalars"]:
                last = run.Scalars(tag)[-1]
                found[tag] = (last.step, last.value)
        return real(loop)

    monkeypatch.setattr(BilevelLoop, "step", watched)
    return found


def require_curves(found: dict[str, tuple[int, float]]) -> None:
    """Check that probabilities, losses and noise are shown while the loop runs."""
    for block in (0, 1):
        own = [found[tag][0] for tag in found if tag.startswith(f"probability/layer_{block}/")]
        assert max(own) == found["probability_of/pp_2"][0]  # steps of the training, as the losses
    for name in ("batch", "pp"):
        shares = [
            own for tag, (_, own) in found.items() if tag.startswith(f"probability_of/{name}_")
        ]
        assert len(shares) == 2
        assert sum(shares) == pytest.approx(1.0)
    wanted = {"loss/train", "loss/validation", "search/noise_scale_sequences"}
    assert wanted <= set(found)
    assert {found[tag][0] for tag in wanted} == {11}  # all that is done
    assert not any(tag.startswith("z_results/") for tag in found)


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
@pytest.mark.parametrize(("step", "bits"), [(0, {16}), (10, {16, 4})], ids=["trials", "priced"])
def test_ctrl_c_in_the_loop_leaves_the_best_plan_of_what_is_known(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch, step: int, bits: set[int]
) -> None:
    def due(loop: BilevelLoop) -> bool:
        return loop.trainer.step == step

    monkeypatch.setattr(BilevelLoop, "step", interrupting(BilevelLoop.step, due))
    if step == 0:
        trials = interrupting(Trials.price_bits, lambda *_: True)
        monkeypatch.setattr(Trials, "price_bits", trials)
    done = command(*OVERRIDES, "output.tensorboard=false", f"hydra.run.dir={tmp_path}")
    assert done.status == 0, done.err
    assert "interrupted; plan.json is the best plan so far" in done.err
    data = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))
    assert data["search"]["stopped_by"] == "user"
    assert data["search"]["steps"] == step
    plan = Plan.from_dict(data)
    sent = {layer.grad_comm_bits for layer in plan.layers if layer.dp > 1}
    assert sent | {layer.tp_comm_bits for layer in plan.layers if layer.tp > 1} <= bits


@pytest.mark.usefixtures("listens")
def test_ctrl_c_in_the_trainings_keeps_the_plan(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Retraining, "train", interrupting(Retraining.train, lambda *_, **__: True))
    done = command(*OVERRIDES, "output.tensorboard=false", f"hydra.run.dir={tmp_path}")
    assert done.status == 0, done.err
    data = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))
    assert data["search"]["stopped_by"] is None
    assert "time_to_target_s" not in data


def test_time_to_target_is_that_of_the_first_crossing() -> None:
    curve = ((1.0, 3.0), (2.0, 2.0), (4.0, 1.0), (8.0, 1.0))
    whole = Retrained(curve, 8)
    assert whole.seconds_to(1.5) == pytest.approx(2.0 * 2**0.5)
    assert whole.seconds_to(3.5) == pytest.approx(1.0)
    assert whole.seconds_to(0.5) == inf
    runs = {REFERENCE: whole, SCHEDULE: Retrained(curve[:2], 2)}
    assert times(runs) == {REFERENCE: pytest.approx(4.0), SCHEDULE: inf}


def test_the_table_of_times_says_what_did_not_reach_the_target() -> None:
    """It printed `inf`."""
    curve = ((1.0, 3.0), (2.0, 2.0), (4.0, 1.0))
    whole, short = Retrained(curve, 4), Retrained(curve[:2], 2)
    runs = {REFERENCE: whole, SCHEDULE: whole, "batch 8": short}
    took, over, _ = (
        [str(cell) for cell in column.cells] for column in time_table([runs]).columns[1:]
    )
    assert took == ["4.000", "4.000", "not reached"]
    assert over == ["1.000", "1.000", "-"]
    unknown = time_table([runs | {SCHEDULE: short}]).columns[2]
    assert set(unknown.cells) == {"-"}


def test_retraining_follows_the_phases_and_stops_at_its_target() -> None:
    loop = tiny_loop(batch_candidates=(8, 16), evaluate_every=1)
    small, large = (loop.best_plan(batch) for batch in (8, 16))
    retraining = Retraining(loop.settings, corpus(), 3, small.seconds)
    seconds = 3 * small.seconds + 2 * large.seconds
    ramp = [TrainingPhase(0, small), TrainingPhase(3, large)]
    first, again = (retraining.train(ramp, 0.999 * seconds) for _ in range(2))
    assert first == again
    assert first.steps == 5
    assert first.curve[-1][0] == pytest.approx(seconds)
    constant = retraining.train([TrainingPhase(0, small)], 2.999 * small.seconds)
    assert first.curve[:3] == constant.curve
    soon = retraining.train(ramp, seconds, target=first.curve[1][1])
    assert soon.curve == first.curve[: len(soon.curve)]
    assert len(soon.curve) <= 2
    other = replace(retraining, seed=4).train(ramp, seconds)
    assert other.curve[0][1] != first.curve[0][1]


def test_equal_schedules_are_trained_once(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = tiny_loop()
    loop.run()
    schedules = compared(loop, loop.phases())
    calls = []
    real = Retraining.train

    def counted(*arguments: Any, **named: Any) -> Retrained:
        calls.append(named)
        return real(*arguments, **named)

    monkeypatch.setattr(Retraining, "train", counted)
    found = judged(loop, schedules)
    assert set(found) == {SCHEDULE, REFERENCE, "batch 8"}
    assert found[SCHEDULE] is found["batch 8"]
    assert len(calls) == 2
    reference = loop.settings.retrain_steps * schedules[REFERENCE][0].plan.seconds
    assert calls[1]["seconds"] == pytest.approx(loop.settings.retrain_factor * reference)
    assert calls[1]["target"] == found[REFERENCE].final_loss


@pytest.mark.slow
def test_the_experiment_compares_the_loop_with_its_controls(
    capsys: pytest.CaptureFixture[str],
) -> None:
    few = ["bilevel.num_steps=6", "bilevel.warmup_steps=3", "space.num_micro_batches=1"]
    arguments = [*OVERRIDES[1:], *few, "bilevel.batch_candidates=[8,16]", "space.pp=2"]
    assert main([*arguments, "seeds=[1]"]) == 0
    out = capsys.readouterr().out
    for name in (
        "found",
        "all_16_bit",
        "trials",
        "long trials",
        "bits 4",
        "greedy",
        "best uniform",
        *CONTROLS,
    ):
        assert f"| {name} |" in out
    assert "- found, all seeds: " in out


def test_seeds_that_trained_equal_plans_share_a_line() -> None:
    plans = [{"found": "one"}, {"found": "another"}, {"found": "one"}]
    assert plan_lines("345", plans) == "- found, seed 3, 5: one\n- found, seed 4: another"
    assert plan_lines("35", plans[::2]) == "- found, all seeds: one"


def test_the_greedy_rule_lowers_the_least_sensitive_block_first() -> None:
    loop = tiny_loop(tp=(1,), grad_bits=(16, 4, 2), space_pp=(1,))
    free = loop.space.free
    fast = loop.best_plan(8, free)
    slow = loop.best_plan(8, free.at_bits(16, 16))
    lossy = torch.tensor([float(bits < 16) for _, bits in free.gradient_pairs]).double()
    for first in (0, 1):
        weights = torch.tensor([[5.0], [5.0]]).double()
        weights[first] = 1.0
        sensitivity = replace(free, gradient=weights * lossy)
        between = replace(fast, seconds=0.5 * (fast.seconds + slow.seconds))
        found = greedy(loop, sensitivity, between)
        assert found.seconds <= between.seconds
        assert found.blocks[first].grad_comm_bits < 16
        assert found.blocks[1 - first].grad_comm_bits == 16
    least = greedy(loop, free, fast)
    assert least.seconds == pytest.approx(fast.seconds)
    assert greedy(loop, free, replace(fast, seconds=inf)).blocks == slow.blocks


def test_the_paired_interval_is_exact_and_an_unreached_target_counts_as_the_latest() -> None:
    runs = [
        {SCHEDULE: 1.0, "same": 1.0, "late": exp(0.1), "never": inf},
        {SCHEDULE: 2.0, "same": 2.0, "late": 2.0 * exp(0.3), "never": 4.0},
    ]
    text = paired(runs)
    assert "| same | 1.500 | 1.000 (1.000 to 1.000) | 0 of 2 | 2 of 2 | 1.000 |" in text
    # mean 0.2, standard error 0.1, t of one degree of freedom 12.706
    assert f"1.221 ({exp(0.2 - 1.2706):.3f} to {exp(0.2 + 1.2706):.3f}) | 2 of 2" in text
    assert "| never | inf | 2.000 (2.000 to 2.000) | 2 of 2 | 1 of 2 |" in text
