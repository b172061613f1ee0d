"""Where memory is short, the sentence offers changes of the job that were tried."""

import re
from dataclasses import replace

import pytest

from darts_parallel.errors import InfeasibleError
from darts_parallel.planner._memory_offers import _changes
from darts_parallel.planner.planning import plan
from darts_parallel.problem.problem import load_problem

SHORT = ("search.num_steps=2", "search.num_restarts=1", "search.polish=false", "space=uniform")
FULL = (
    "model=llama2_7b",
    "cluster=a10_4x4",
    "cluster.nodes.0.count=1",
    "space.zero_stage=0",
    *SHORT,
)
OFFER = re.compile(
    r"(training\.\S+|space\.zero_stage=3|space\.cp=null|trainer=.*?'|\d+ nodes instead of \d+)"
    r" \((≤ )?([\d.e+]+) s, fits: (\d+) %[^)]*\)"
)


@pytest.fixture(autouse=True)
def _enough_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine does not end the searches of the offers."""
    monkeypatch.setattr("darts_parallel.planner._memory_offers.SECONDS", 60.0)


def refused(*words: str) -> str:
    with pytest.raises(InfeasibleError) as caught:
        plan(load_problem([*FULL, *words]))
    return str(caught.value)


OFFLOADING = "trainer=deepspeed 'space.offload={optimizer: 1.0}'"
BOX = ("cluster=box", "gpu=rtx4090", "gpus=4", "nodes=1", "gbs=32", "seq=4096")


@pytest.mark.parametrize(
    "job", [FULL, ("model=llama3_8b", *BOX, "trainer=deepspeed", *SHORT[:-1])], ids=["full", "box"]
)
@pytest.mark.slow
def test_every_offer_has_the_seconds_and_the_chance_of_its_command(job: tuple[str, ...]) -> None:
    """The seconds of 8-bit Adam were of a plan above the limit, which the command does not choose."""
    with pytest.raises(InfeasibleError) as caught:
        plan(load_problem(job))
    offers = OFFER.findall(str(caught.value))
    kinds = [change for change, *_ in offers]
    assert "training.lora_rank=16" in kinds
    assert "2 nodes instead of 1" in kinds
    assert (OFFLOADING in kinds) == (job != FULL)
    for change, limit, seconds, fits in offers:
        words = change.replace("'", "").split(" ", 1)
        if "nodes" in change:
            words = ["nodes=2"]
        keys = [word.partition("=")[0] + "=" for word in words]
        kept = [word for word in job if not word.startswith(tuple(keys))]
        found = plan(load_problem([*kept, *words]))
        assert not limit
        assert found.result is not None
        assert found.result.iteration_time_s == pytest.approx(float(seconds), rel=0.01)
        assert found.out_of_memory == pytest.approx(1 - float(fits) / 100, abs=0.02)


@pytest.mark.slow
def test_more_nodes_of_unlike_ones_are_named_by_their_gpu() -> None:
    said = refused("model=llama2_70b", "cluster=a10_a100_mixed")
    assert re.search(r"\d+ nodes of a100_40 instead of 1 \(", said)


def test_an_offer_without_a_search_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("darts_parallel.planner._memory_offers.SECONDS", 0.0)
    assert "training.lora_rank=16 (not searched)" in refused()


def test_seconds_of_uniform_plans_are_a_limit_where_others_are_searched() -> None:
    sentence = refused("space=layerwise")
    limits = {change: limit for change, limit, *_ in OFFER.findall(sentence)}
    assert limits.pop("training.lora_rank=16") == "≤ "


LONG = (
    "model=llama3_8b",
    "model.max_seq_len=32768",
    "seq=32768",
    "gbs=16",
    "cluster=box",
    "gpu=rtx4090",
    "gpus=4",
    "nodes=1",
    "training.lora_rank=16",
    *SHORT[:-1],
)


@pytest.mark.parametrize(("trainer", "divides"), [("accelerate", True), ("deepspeed", False)])
def test_logits_of_a_long_sequence_are_answered_with_the_fused_loss(
    trainer: str, divides: bool
) -> None:
    job = [*LONG, f"trainer={trainer}"]
    with pytest.raises(InfeasibleError) as caught:
        plan(load_problem(job))
    offers = {change: float(seconds) for change, _, seconds, _ in OFFER.findall(str(caught.value))}
    assert ("space.cp=null" in offers) == divides
    found = plan(load_problem([*job, "training.loss=fused"])).result.iteration_time_s
    assert found == pytest.approx(offers["training.loss=fused"], rel=6e-3)


def test_the_fused_loss_is_offered_where_a_trainer_writes_it() -> None:
    for trainer, writes in (("none", True), ("megatron", True), ("galvatron", False)):
        config = load_problem(
            ["model=toy", "training=toy", "cluster=toy", f"trainer={trainer}"]
        ).config
        assert ("training.loss=fused" in [words for words, _, _ in _changes(config)]) == writes
        used = replace(config, training=replace(config.training, loss="fused"))
        assert "training.loss=fused" not in [words for words, _, _ in _changes(used)]


@pytest.mark.slow
def test_offers_of_simulated_pipelines_have_no_seconds() -> None:
    """Such a search takes more seconds than there are."""
    sentence = refused("cost.pipeline=simulated")
    assert "or training.lora_rank=16 (not searched)" in sentence
    assert not OFFER.search(sentence)


def test_only_what_the_trainer_writes_is_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron-LM trains all weights of its own models and has no 8-bit Adam."""
    monkeypatch.setattr("darts_parallel.planner._memory_offers.SECONDS", 0.0)
    sentence = refused("trainer=megatron")
    assert "lora_rank" not in sentence
    assert "adam_8bit" not in sentence
    assert "space.offload" not in sentence


LARGE = ("model=llama2_7b", "cluster=a10_4x4", "cluster.nodes.0.count=1", *SHORT)


@pytest.mark.parametrize("trainer", ["none", "deepspeed", "torch", "galvatron"])
def test_offloading_is_offered_in_the_words_of_a_trainer_that_writes_it(
    monkeypatch: pytest.MonkeyPatch, trainer: str
) -> None:
    """DeepSpeed writes one share of the optimizer's state; no other trainer writes any."""
    monkeypatch.setattr("darts_parallel.planner._memory_offers.SECONDS", 0.0)
    with pytest.raises(InfeasibleError) as caught:
        plan(load_problem([*LARGE, f"trainer={trainer}"]))
    assert (OFFLOADING in str(caught.value)) == (trainer in ("none", "deepspeed"))
    assert str(caught.value).count("space.offload") <= 1


def test_the_offer_of_offloading_is_followed_to_a_plan_that_is_exported() -> None:
    words = OFFLOADING.replace("'", "").split(" ", 1)
    found = plan(load_problem([*LARGE, *words, "export=deepspeed"]))
    assert found.plan.offloaded_optimizer == 1.0


def test_a_choice_that_is_free_is_not_offered() -> None:
    config = load_problem(["model=toy", "training=toy", "cluster=toy"]).config
    for pinned, offered in ((None, False), (1, True), ([0, 3], False)):
        space = replace(config.space, zero_stage=pinned)
        changes = [words for words, _, _ in _changes(replace(config, space=space))]
        assert ("space.zero_stage=3" in changes) == offered


@pytest.mark.slow
def test_offers_say_where_they_break_a_limit() -> None:
    """They named plans that fit with 50 %, or beyond the deadline, as those that help."""
    hours = ("objective=cost_under_deadline", "objective.num_iterations=3600")
    price = "cluster.nodes.0.price_per_hour_usd=1"
    beyond = ", beyond the limit of objective=cost_under_deadline)"
    late = refused(*hours, price, "objective.deadline_hours=1e-3")
    assert late.count(beyond) == late.count(" s, fits: ") > 0
    assert beyond not in refused(*hours, price, "objective.deadline_hours=1e6")
    memory = "cluster.devices.a10.memory_GiB=22"
    priced = plan(load_problem([*FULL, memory, "price=true", "space.out_of_memory=0.5"])).warning
    chances = [int(own[-1]) for own in OFFER.findall(priced)]
    assert priced.count(" %, less than the 80 % asked for)") == sum(own < 80 for own in chances)
    assert max(chances) >= 80 > min(chances)
