"""The end of the report: every trainer, the ladder, and files that the commands it prints take."""

import json
from pathlib import Path

import pytest

from darts_parallel.cli import _trainers
from darts_parallel.cli._trainers import offers, own_problem, start_command
from darts_parallel.config.trainer import NEWEST
from darts_parallel.cost.evaluation import evaluate
from darts_parallel.export import export_plan, taken_by
from darts_parallel.planner import out_of_memory
from darts_parallel.planner.planning import plan
from darts_parallel.plans import Plan
from darts_parallel.problem.problem import Problem, load_problem
from darts_parallel.report import shown_path
from tests.support.commands import TOY, Command

LLAMA = [
    *TOY,
    "model.gated_mlp=true",
    "model.learned_positions=false",
    "model.linear_bias=false",
    "model.norm_bias=false",
    "model.vocab_size=512",
    "verification.enabled=false",
]


@pytest.mark.parametrize("trainer", ["none", "galvatron"])
def test_every_trainer_takes_the_plan_or_has_one_of_its_own_that_it_takes(trainer: str) -> None:
    problem = load_problem([*LLAMA, f"trainer={trainer}"])
    planned = plan(problem)
    found = list(offers(planned.problem, planned))
    assert [offer.name for offer in found] == list(NEWEST)
    assert [offer.name for offer in found if offer.takes] == taken_by(problem, planned.plan)
    for offer in found:
        assert offer.takes or offer.plan != planned.plan
        if offer.plan is not None:
            own = own_problem(planned.problem, offer.name)
            assert own.training.software in (None, *own.config.abilities(offer.name).software)
            assert export_plan(own, offer.plan, offer.name).files
            seconds = evaluate(offer.plan, own).iteration_time_s
            assert offer.seconds == pytest.approx(seconds)
            if offer.takes:
                assert seconds <= evaluate(planned.plan, own).iteration_time_s * (1 + 1e-9)


def test_a_row_is_the_trainers_own_optimum_by_its_own_efficiencies() -> None:
    """Calibrated efficiencies change the seconds of Megatron-LM and torchtitan, not of Galvatron."""
    job = [*LLAMA, "space=uniform", "search=exact", "cluster.devices.toy.memory_GiB=16"]
    problem = load_problem(job)
    planned = plan(problem)
    best = evaluate(planned.plan, planned.problem).iteration_time_s
    found = {offer.name: offer for offer in offers(planned.problem, planned)}
    for name in ("megatron", "torchtitan", "galvatron"):
        alone = plan(load_problem([*job, f"trainer={name}"]))
        assert found[name].seconds == pytest.approx(alone.result.iteration_time_s, rel=2e-3)
    assert found["megatron"].seconds != pytest.approx(best, rel=1e-3)


def test_a_row_keeps_the_chance_by_the_trainers_own_bytes() -> None:
    """Hugging Face's models keep more bytes, so the chosen plan is too risky there."""
    job = ["model=llama3_8b", "cluster=h100_8x8", "space=uniform", "space.cp=2", "search=exact"]
    problem = load_problem(job)
    planned = plan(problem)
    found = {offer.name: offer for offer in offers(planned.problem, planned)}
    row, own = found["accelerate"], own_problem(planned.problem, "accelerate")
    assert out_of_memory(planned.plan, own) > problem.config.space.out_of_memory >= row.chance
    assert row.takes
    pins = [f"space.zero_stage={planned.plan.layers[1].zero_stage}", "space.micro_batch_size=2"]
    pinned = load_problem([*job, *pins, "space.recompute=none", "space.tp=1", "space.pp=1"])
    alone = {offer.name: offer for offer in offers(pinned, planned)}
    assert alone["accelerate"].plan is not None  # a risky plan is better than none


@pytest.mark.parametrize(
    ("trainer", "job"),
    [
        ("deepspeed", []),
        ("torchtitan", []),
        ("deepspeed", ["model=qwen3_30b_a3b", "cluster=h100_8x8"]),
    ],
)
def test_a_row_is_as_fast_as_the_trainers_own_command(
    trainer: str, job: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the headroom of the limit alone the first row was 119.85 s, and its command found 111.99 s."""
    monkeypatch.setattr(_trainers, "NEWEST", (trainer,))
    job = [*job, "space=uniform", "search=exact"]
    problem = load_problem(job)
    planned = plan(problem)
    (row,) = offers(planned.problem, planned)
    alone = plan(load_problem([*job, f"trainer={trainer}"])).result.iteration_time_s
    assert alone * (1.0 - problem.config.search.tie) <= row.seconds <= alone * (1.0 + 1e-9)
    assert out_of_memory(row.plan, own_problem(planned.problem, trainer)) == row.chance
    assert row.chance <= problem.config.space.out_of_memory


@pytest.mark.parametrize("risky", [True, False])
def test_a_row_recomputes_the_first_blocks_only_where_that_keeps_the_chance(
    risky: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mixed(own: Plan) -> bool:
        return len({layer.recompute for layer in own.layers}) > 1

    def chance(own: Plan, problem: Problem) -> float | None:
        return 1.0 if risky and mixed(own) else out_of_memory(own, problem)

    monkeypatch.setattr(_trainers, "NEWEST", ("megatron",))
    monkeypatch.setattr(_trainers, "out_of_memory", chance)
    planned = plan(load_problem(["space=uniform", "search=exact"]))
    (row,) = offers(planned.problem, planned)
    assert mixed(row.plan) is not risky
    assert row.chance <= planned.problem.config.space.out_of_memory


def test_what_one_trainer_sets_refuses_no_other() -> None:
    """DeepSpeed reduces gradients in 16 bits; the rows of other trainers are about their own jobs."""
    job = [*LLAMA, "space=uniform", "search=exact", "cluster.devices.toy.memory_GiB=16"]
    problem = load_problem([*job, "trainer=deepspeed"])
    planned = plan(problem)
    found = list(offers(planned.problem, planned))
    assert all(offer.plan for offer in found), [offer.why for offer in found]


def test_a_pin_that_a_trainer_cannot_run_is_a_row_with_its_reason() -> None:
    problem = load_problem([*LLAMA, "space=uniform", "space.cp=2"])
    planned = plan(problem)
    assert planned.plan.cp == 2
    found = {offer.name: offer for offer in offers(planned.problem, planned)}
    assert found["torch"].plan is None
    assert found["torch"].why.startswith("space.cp=2 must be 1 with space.executable")
    assert found["megatron"].takes
    pinned = load_problem([*LLAMA, "space=uniform", "space.pp=2", "space.tp=2"])
    planned = plan(pinned)
    found = {offer.name: offer for offer in offers(planned.problem, planned)}
    assert found["accelerate"].why == "pp=2, and it has no pipeline"


def test_the_ladders_files_are_plans_and_plan_json_says_all_of_it(command: Command) -> None:
    done = command(
        *(word for word in LLAMA if "verification" not in word),
        "output.tensorboard=false",
        "cluster.devices.toy.memory_GiB=0.1025",
        "space.out_of_memory=0.3",
    )
    assert done.status == 0, done.err
    path = command.plan_file()
    data = json.loads(path.read_text())
    assert data["trainer"] == "none"
    assert set(data["trainers"]) == set(NEWEST)
    levels = [rung for rung in data["ladder"] if rung["plan"] != "plan_simplest.json"]
    chances = [rung["chance"] for rung in levels]
    assert len(chances) > 1
    assert chances == sorted(chances, reverse=True)
    (own,) = [rung for rung in data["ladder"] if rung["plan"] == "plan.json"]
    assert own["chance"] == data["predicted"]["out_of_memory_probability"]
    assert "no plan keeps space.out_of_memory=0.3; it takes cluster.devices." in " ".join(
        done.out.split()
    )
    for rung in data["ladder"]:
        priced = command(f"plan={path.parent / rung['plan']}", "output.tensorboard=false")
        assert priced.status == 0, priced.err
        assert f"fits: {100 * (1 - rung['chance']):.0f} %" in priced.out


def test_a_plan_is_started_by_a_trainer_that_takes_it_and_no_other() -> None:
    problem = load_problem(
        [*TOY, "cluster.nodes.0.count=2", "cluster.nodes.0.gpus=4", "trainer=torch"]
    )
    chosen = plan(load_problem([*TOY, "space=uniform", "search=exact"])).plan
    assert (
        start_command(problem, chosen, Path("p.json")) == "darts-parallel plan=p.json export=torch"
    )
    spaces = Path.cwd() / "my plan.json"
    assert start_command(problem, chosen, spaces).endswith(" plan='my plan.json' export=torch")
    nobody = load_problem([*TOY, "training.loss=chunked", "training.attention_kernel=triton"])
    sentence = "no trainer takes p.json; plan for one: darts-parallel ... trainer=NAME"
    assert start_command(nobody, chosen, Path("p.json")) == sentence


def test_the_report_says_that_no_trainer_takes_the_plan(command: Command) -> None:
    done = command(*LLAMA, "space.tp_comm_bits=8", "space.tp=2", "output.tensorboard=false")
    assert done.status == 0, done.err
    file = shown_path(command.plan_file())
    line = f"no trainer takes {file}; plan for one: darts-parallel ... trainer=NAME"
    assert done.out.splitlines()[-1] == f"start it: {line}"
    page = (command.plan_file().parent / "report.html").read_text().replace("\n", "")
    assert "plan for one</p><pre>darts-parallel ... trainer=NAME</pre>" in page
