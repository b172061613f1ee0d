"""`space.trainer`: what a search restricted to a trainer finds, the trainer takes."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from darts_parallel.config.cluster import PRECISIONS
from darts_parallel.config.schema import EXPORTS
from darts_parallel.config.trainer import read_trainer
from darts_parallel.errors import ConfigError, UnsupportedError
from darts_parallel.export import TARGETS, export_plan, require_trainers, taken_by
from darts_parallel.export.common import read_words
from darts_parallel.planner import plan as find_plan
from darts_parallel.plans.space import outer_spaces
from darts_parallel.plans.strategy import LayerStrategy, Plan
from darts_parallel.plans.trainers import facts, job_facts
from darts_parallel.problem.problem import Problem, load_problem
from tests.support.export_plans import LLAMA, MIXTURE, TOY, plan_of

FREE = ["space.cp=null", "space.virtual_stages=null", "space.shard_size=null"]
MODELS = {
    name: LLAMA if name in ("torchtitan", "torchtitan_0_2", "nanotron") else TOY for name in EXPORTS
}


def random_plans(problem: Problem, rng: random.Random, count: int) -> list[Plan]:
    """Plans of the space; stages are cut as the trainer does, else anywhere that the model allows."""
    plans, layers_of = [], problem.model.layers
    units = [i for i, layer in enumerate(layers_of) if i and not layer.fused_to_previous]
    spaces = outer_spaces(problem)
    for _ in range(count):
        space = rng.choice(spaces)
        layers, batch = problem.num_layers, problem.training.global_batch_size
        pairs = [
            (c, m) for c in space.choices for m in space.num_micro_batches if not batch % (c.dp * m)
        ]
        strategy, micro_batches = rng.choice(pairs)
        same = problem.config.space.kind == "uniform"
        mixed = [c for c, m in pairs if m == micro_batches and (c == strategy or not same)]
        cuts = sorted(rng.sample(units, space.pp * space.virtual_stages - 1))
        cuts = list(space.cuts) or cuts
        own = [rng.choice(mixed) for _ in range(layers)]
        if (
            problem.config.trainer.whole_ends == "always"
        ):  # embedding, head and loss share a strategy
            own[-2:] = own[:1] * 2
        plan = Plan(
            micro_batches,
            (0, *cuts, layers),
            tuple(own),
            cp=space.cp,
            virtual_stages=space.virtual_stages,
        )
        plans.append(plan)
    return plans


@pytest.mark.parametrize("trainer", EXPORTS)
def test_every_plan_of_a_trainers_space_is_exported(trainer: str) -> None:
    problem = load_problem([*MODELS[trainer], *FREE, f"trainer={trainer}"])
    config = problem.config
    assert (config.space.trainer, config.export, config.trainer.name) == (trainer, trainer, trainer)
    assert config.space.kind == ("layerwise" if config.trainer.layerwise else "uniform")
    assert config.training.software in (config.trainer.software or (None,))
    for plan in random_plans(problem, random.Random(trainer), 40):
        assert export_plan(problem, plan, trainer).files


@pytest.mark.parametrize("predictions", [0, 2])
def test_every_stage_of_a_hybrid_in_megatrons_space_has_a_layer_of_its_pattern(
    predictions: int,
) -> None:
    hybrid = [
        "model.num_layers=6",
        "model.hybrid_override_pattern=M-M*-M",
        f"model.mtp_num_layers={predictions}",
        "model.learned_positions=false",
    ]
    problem = load_problem([*TOY, *FREE, *hybrid, "space.trainer=megatron"])
    for plan in random_plans(problem, random.Random(predictions), 40):
        script = export_plan(problem, plan, "megatron").files["megatron.sh"]
        pattern = script.split("--hybrid-layer-pattern")[1].split()[0].strip('"')
        assert all(pattern.split("/")[0].split("|"))


HANDED = {
    "encoder and decoder": [*TOY, "model.num_encoder_layers=2"],
    "mixture": MIXTURE,
    "adapters": [*LLAMA, "training.lora_rank=8"],
    "hybrid": ["model=nemotron_h_8b", "training=nemotron_h_8b", "cluster=a100_80_8x8"],
}


@pytest.mark.parametrize(
    ("trainer", "model"),
    [
        *(("deepspeed", model) for model in HANDED),
        *(("accelerate", m) for m in HANDED if m != "mixture"),
        ("megatron", "encoder and decoder"),
    ],
)
def test_every_plan_of_a_trainer_that_is_handed_the_model_is_exported(
    trainer: str, model: str
) -> None:
    problem = load_problem([*HANDED[model], *FREE, f"space.trainer={trainer}"])
    require_trainers(problem)
    for plan in random_plans(problem, random.Random(model), 40):
        assert export_plan(problem, plan, trainer).files


@pytest.mark.parametrize(("model", "pp"), [(TOY, 1), (LLAMA, 1), (LLAMA, 2)])
def test_a_trainers_space_leaves_out_only_what_it_refuses(model: list[str], pp: int) -> None:
    everything = load_problem(
        [*model, *FREE, "space=uniform", f"space.pp={pp}", "space.virtual_stages=1"]
    )
    known = {}
    layers = everything.num_layers
    cuts = tuple(layers * stage // pp for stage in range(1, pp))
    for name in (name for name in EXPORTS if MODELS[name] == model):
        mine = load_problem([*model, *FREE, f"space.trainer={name}"])
        spaces = [space for space in outer_spaces(mine) if space.pp == pp]
        known[name] = {(space.cp, choice) for space in spaces for choice in space.choices}
        # the other trainers take the stages that one of them cuts itself
        cuts = next((space.cuts for space in spaces if space.cuts), cuts)
    for space in outer_spaces(everything):
        count = space.num_micro_batches[0]
        for choice in space.choices:
            if 16 % (choice.dp * count):
                continue
            plan = Plan(count, (0, *cuts, layers), (choice,) * layers, cp=space.cp)
            taken = taken_by(everything, plan)
            found = {trainer: (space.cp, choice) in own for trainer, own in known.items()}
            assert found == {trainer: trainer in taken for trainer in known}, choice


def test_a_model_that_a_trainer_lacks_is_refused_before_the_search() -> None:
    for key in ("export", "space.trainer"):
        with pytest.raises(UnsupportedError, match=f"^{key}=nanotron: .*gated_mlp=false"):
            require_trainers(load_problem([*TOY, f"{key}=nanotron"]))
        require_trainers(load_problem([*LLAMA, f"{key}=nanotron"]))
    require_trainers(load_problem([*TOY, "export=deepspeed"]))  # a plan's reasons are no model's


def test_a_trainer_is_a_file_of_data_whose_rules_name_settings_and_an_exporter() -> None:
    toy = load_problem(TOY)
    known = facts(
        job_facts(toy.model, toy.training, toy.software), 1, 1, "1f1b", LayerStrategy(1, 8)
    )
    for name in EXPORTS:
        rules = read_trainer(name)
        assert rules.whole_ends in ("never", "hybrids", "always")
        for lack in rules.lacks:
            assert {*lack.when, *lack.model} <= set(known), lack
            lack.holds(known)
            ways = lack.instead.removeprefix("a model such as ").split(" or ")[0]
            assert all("=" in way for way in ways.split()), lack
    assert set(TARGETS) == set(EXPORTS)


@pytest.mark.parametrize(
    ("when", "sentence"),
    [
        (
            "tp: 4",
            r"trainer\.lacks\.when\.tp=4 must be a list of values, some, none or many; try \[4\]",
        ),
        ("tp: lots", r"\.when\.tp=lots must be a list of values, some, none or many"),
        (
            "tpp: many",
            r"when\.tpp must name a key of the model, the training or a strategy; try tp\.",
        ),
        ("num_experts: some, tpp: many", r"when\.tpp must name"),
    ],
)
def test_a_rule_of_an_own_trainer_that_names_no_setting_is_refused(
    tmp_path: Path, when: str, sentence: str
) -> None:
    """It ended in a traceback."""
    head = "# @package _global_\nspace: {trainer: megatron}\ntrainer:\n  name: megatron\n"
    rule = f"  lacks: [{{when: {{{when}}}, why: because, instead: tp=1}}]\n"
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer/own.yaml").write_text(head + rule)
    with pytest.raises(ConfigError, match=sentence):
        outer_spaces(load_problem([*TOY, "trainer=own"], str(tmp_path)))


def test_a_trainer_with_pins_that_it_never_runs_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"=accelerate runs no plan.*: pp=2, and it has no pipeline; try "
    ):
        outer_spaces(load_problem([*TOY, "space.trainer=accelerate", "space.pp=2"]))
    with pytest.raises(
        ConfigError, match=r"=deepspeed runs no plan.*: pp=2 with num_experts=.*; try "
    ):
        outer_spaces(load_problem([*MIXTURE, "space.trainer=deepspeed", "space.pp=2"]))
    with pytest.raises(ConfigError, match=r"space\.trainer=megatrn must be one of"):
        load_problem([*TOY, "space.trainer=megatrn"])


@pytest.mark.slow
def test_galvatrons_own_search_is_layerwise_and_its_runtime_takes_what_it_finds() -> None:
    small = ["search.num_steps=20", "search.num_restarts=4", "space.num_micro_batches=[2,4]"]
    problem = load_problem(
        [*TOY, *small, "trainer=galvatron", "cluster.devices.toy.memory_GiB=0.16"]
    )
    for space in outer_spaces(problem):
        assert len({c.sequence_parallel for c in space.choices if c.tp > 1}) <= 1
        assert not {0, 2} <= {c.zero_stage for c in space.choices if c.dp > 1}
    found = find_plan(problem)
    assert problem.config.space.kind == "layerwise"
    assert export_plan(problem, found.plan, "galvatron").files
    uniform = find_plan(
        load_problem(
            [
                *TOY,
                *small,
                "trainer=galvatron",
                "space.kind=uniform",
                "cluster.devices.toy.memory_GiB=0.16",
            ]
        )
    )
    assert found.result is not None
    assert uniform.result is not None
    assert found.result.iteration_time_s <= uniform.result.iteration_time_s * (1 + 2e-3)


@pytest.mark.parametrize(
    ("repeated", "option"),
    [
        ([], ("none", "op")),
        (range(8), ("full", "op")),
        ([1, 3, 6], ("selective", "2")),
        ([2, 7], ("selective", "3")),
        ([4], ("selective", "5")),
        ([1, 3, 5, 7], None),
        ([0, 2, 4, 6], None),
    ],
)
def test_torchtitan_0_2_counts_the_blocks_of_a_stage_from_1(
    repeated: Sequence[int], option: tuple[str, str] | None
) -> None:
    """The first stage has five of the eight blocks."""
    llama = load_problem(LLAMA)
    base = plan_of(llama, LayerStrategy(1, 4, 1), 4, (6,))
    layers = tuple(
        replace(own, recompute="full" if index - 1 in repeated else "none")
        for index, own in enumerate(base.layers)
    )
    if option is None:
        with pytest.raises(UnsupportedError, match=r"are not every n-th of a stage.*space=uniform"):
            export_plan(llama, replace(base, layers=layers), "torchtitan_0_2")
        return
    text = export_plan(llama, replace(base, layers=layers), "torchtitan_0_2").files[
        "torchtitan.toml"
    ]
    mode, count = option
    assert f'[activation_checkpoint]\nmode = "{mode}"\nselective_ac_option = "{count}"\n' in text


@pytest.mark.parametrize("name", ["accelerate", "nanotron", "torchtitan", "torchtitan_0_2"])
def test_a_precision_without_a_word_is_lacking(name: str) -> None:
    lacks = read_trainer(name).lacks
    alone = [lack.when["precision"] for lack in lacks if list(lack.when) == ["precision"]]
    refused = {precision for values in alone for precision in values}
    wordless = set(PRECISIONS) - set(read_words()[name]["precision"])
    assert wordless <= refused
