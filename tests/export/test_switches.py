"""Switches of the run: a trainer's files set them, or its exporter refuses them by name."""

from dataclasses import replace
from typing import Any

import pytest

from darts_parallel import evaluate, plan
from darts_parallel.config import EXPORTS, read_trainer
from darts_parallel.config.training import KERNELS, OPTIMIZERS
from darts_parallel.errors import ConfigError, UnsupportedError
from darts_parallel.export import export_plan
from darts_parallel.export.common import SWITCHES
from darts_parallel.export.targets import refusals, require_trainers
from darts_parallel.plans.strategy import LayerStrategy
from darts_parallel.problem.problem import Problem, load_problem
from darts_parallel.report.switches import averaged_switches, switch_savings
from tests.support.export_plans import LLAMA, MIXTURE, plan_of, problem_of

VALUES: dict[str, tuple[Any, ...]] = {
    "attention_kernel": KERNELS,
    "tp_comm_overlap": (False, True),
    "compiled": (False, True),
    "loss": ("full", "chunked", "fused"),
    "cuda_graphs": ("none", "per_layer", "full_iteration"),
    "optimizer": OPTIMIZERS,
    "fp8_dot_product_attention": (False, True),
    "overlap_moe_expert_parallel_comm": (False, True),
    "moe_shared_expert_overlap": (False, True),
    "moe_token_dispatcher_type": ("alltoall", "flex"),
}
STRATEGIES = {
    "megatron": LayerStrategy(2, 4, 1, sequence_parallel=True),
    "nanotron": LayerStrategy(2, 4, 1, sequence_parallel=True),
}
EXPERTS = ("deepspeed", "galvatron", "megatron", "torch", "torchtitan")


def files(trainer: str, **training: Any) -> dict[str, str]:
    """The files of one plan of a trainer, with keys of `training`."""
    of_experts = any("moe" in key for key in training) and trainer in EXPERTS
    given = [*(MIXTURE if of_experts else LLAMA), "training.precision=bf16"]
    if training.get("fp8_dot_product_attention"):
        given += ["+cluster.devices.toy.peak_TFLOPs.fp8=2.0", "training.precision=fp8"]
        training["precision"] = "fp8"
    if trainer.startswith("torchtitan") and training.get("tp_comm_overlap"):
        training["compiled"] = True
    problem = problem_of(tuple(given))
    job = replace(problem.config.training, **training)
    problem = replace(problem, config=replace(problem.config, training=job))
    strategy = STRATEGIES.get(trainer, LayerStrategy(1, 8, 0))
    if training.get("optimizer") == "sgd":  # no distributed optimizer of Megatron's
        strategy = replace(strategy, zero_stage=0)
    if training.get("overlap_moe_expert_parallel_comm"):
        strategy = replace(strategy, ep=4)
    return export_plan(problem, plan_of(problem, strategy, 2), trainer).files


def test_every_switch_has_its_values_here() -> None:
    assert set(VALUES) == set(SWITCHES)
    for name in EXPORTS:
        for key, values in read_trainer(name).switches.items():
            assert set(values) <= {*VALUES.get(key, (32,))}, key  # else the bits of gradients


@pytest.mark.parametrize("trainer", EXPORTS)
@pytest.mark.parametrize("key", VALUES)
def test_a_switch_is_in_the_files_or_refused_by_its_name(trainer: str, key: str) -> None:
    usual = {"moe_token_dispatcher_type": "alltoall"} if "moe" in key else {}
    default = files(trainer, **usual)
    known = read_trainer(trainer).switches.get(key, [])
    written = [default] if known else []
    for value in VALUES[key]:
        if known and value == known[0]:
            assert files(trainer, **{key: value}) == default
        elif value in known:
            written.append(files(trainer, **{key: value}))
        elif value not in (False, "none", "adam", "alltoall"):
            word = str(value).lower()
            with pytest.raises(UnsupportedError, match=rf"training\.{key}={word}, and no .*try "):
                files(trainer, **{key: value})
    # every value has files of its own
    assert len({str(own) for own in written}) == len(known)


@pytest.mark.parametrize("trainer", EXPORTS)
def test_the_price_of_a_trainers_job_reads_the_switches_of_its_files(trainer: str) -> None:
    problem = load_problem([*LLAMA, f"space.trainer={trainer}"])
    for key, values in read_trainer(trainer).switches.items():
        assert getattr(problem.training, key) == values[0]
        # the job itself stays as the user gave it
        assert getattr(problem.config.training, key) in (None, values[0])


@pytest.mark.parametrize("trainer", EXPORTS)
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_bits_of_gradients_that_cost_more_are_in_the_files(trainer: str, precision: str) -> None:
    """fp16 with `training.gradient_bits=32` was priced, and the files of four trainers had 16 bits."""
    seconds: dict[str, set[float]] = {}
    peak = "++cluster.devices.toy.peak_TFLOPs.fp16=1.0"
    for bits in ("null", "16", "32"):
        known = [f"training.precision={precision}", f"training.gradient_bits={bits}"]
        try:
            problem = load_problem([*LLAMA, f"space.trainer={trainer}", peak, *known])
            found = plan_of(problem, STRATEGIES.get(trainer, LayerStrategy(1, 8, 0)), 2)
            text = str(export_plan(problem, found, trainer).files)
        except UnsupportedError:
            continue
        seconds.setdefault(text, set()).add(evaluate(found, problem).iteration_time_s)
    assert all(len(same) == 1 for same in seconds.values())


@pytest.mark.parametrize("trainer", EXPORTS)
def test_single_precision_takes_no_kernel_of_16_bits(trainer: str) -> None:
    strategy = STRATEGIES.get(trainer, LayerStrategy(1, 8, 0))
    for kernel in read_trainer(trainer).switches.get("attention_kernel", ()):
        known = ["training.precision=fp32"]
        known += [f"space.trainer={trainer}", f"training.attention_kernel={kernel}"]
        problem = load_problem([*LLAMA, *known])
        if kernel in ("cudnn", "fa2", "fa3"):
            with pytest.raises(UnsupportedError, match=r"precision=fp32.* 16 bits; .*try "):
                export_plan(problem, plan_of(problem, strategy, 2), trainer)
        else:
            assert export_plan(problem, plan_of(problem, strategy, 2), trainer).files


def test_megatrons_script_names_the_flags_of_its_source() -> None:
    def script(**training: Any) -> str:
        return files("megatron", **training)["megatron.sh"]

    assert "--attention-backend fused" in script()
    assert "--tp-comm-overlap" not in script()
    assert "--sequence-parallel\n    --tp-comm-overlap\n" in script(tp_comm_overlap=True)
    third = script(attention_kernel="fa3")
    assert "--attention-backend flash\n    --flash-attention-version 3" in third
    # what only the installation decides is checked before anything starts
    assert third.index('python -c "import flash_attn_interface"') < third.index("torchrun")
    moments = script(optimizer="adam_bf16_moments")
    assert "--optimizer sgd\n" in script(optimizer="sgd")
    for flag in ("use-precision-aware-optimizer", "exp-avg-dtype bf16", "exp-avg-sq-dtype bf16"):
        assert f"--{flag}\n" in moments
    assert "--cross-entropy-fusion-impl native" in script(loss="fused")
    whole = script(cuda_graphs="full_iteration")
    assert "--cuda-graph-impl full_iteration\n    --no-check-for-nan-in-loss-and-grad" in whole
    experts = script(cuda_graphs="per_layer", moe_token_dispatcher_type="alltoall")
    assert "--cuda-graph-modules attn moe_router" in experts


@pytest.mark.parametrize(
    ("training", "plan", "why"),
    [
        ({"overlap_moe_expert_parallel_comm": True}, {"ep": 1}, "wants expert parallelism"),
        ({"overlap_moe_expert_parallel_comm": True}, {"cuts": 2}, "wants interleaved stages"),
        ({"overlap_moe_expert_parallel_comm": True}, {"cuts": 4}, ""),
        ({"overlap_moe_expert_parallel_comm": True}, {}, ""),
        ({"cuda_graphs": "full_iteration"}, {}, "wants padded experts"),
        ({"cuda_graphs": "per_layer"}, {}, ""),
    ],
)
def test_megatrons_own_conditions_on_mixtures(
    training: dict[str, Any], plan: dict[str, int], why: str
) -> None:
    """Megatron-LM d98e8a64: core/transformer/transformer_config.py, core/transformer/moe/README.md."""
    problem = problem_of((*MIXTURE, "training.moe_token_dispatcher_type=alltoall"))
    job = replace(problem.config.training, **training)
    problem = replace(problem, config=replace(problem.config, training=job))
    chunks = plan.get("cuts", 1)
    pp = min(chunks, 2)
    strategy = LayerStrategy(1, 8 // pp, 1, ep=plan.get("ep", 4))
    layers = problem.num_layers
    cuts = range(layers // chunks, layers, layers // chunks) if chunks > 1 else ()
    own = plan_of(problem, strategy, 2, tuple(cuts)[: chunks - 1], virtual_stages=chunks // pp)
    refused = [reason for reason, _ in refusals(problem, own, "megatron")]
    assert [reason for reason in refused if why and why in reason] or not (why or refused)


def test_a_space_without_plans_names_the_rule_of_its_own_schedule() -> None:
    space = ["pp=2", "virtual_stages=2", "ep=1", "trainer=megatron"]
    switch = "training.overlap_moe_expert_parallel_comm=true"
    problem = load_problem([*MIXTURE, switch, *(f"space.{pin}" for pin in space)])
    with pytest.raises(
        ConfigError, match="ep=1, and its overlap of experts wants expert parallelism"
    ):
        plan(problem)


@pytest.mark.parametrize(
    ("training", "strategy", "why"),
    [
        ({"tp_comm_overlap": True}, LayerStrategy(2, 4, 1), "wants sequence parallelism"),
        ({"cuda_graphs": "per_layer"}, LayerStrategy(1, 8, 1, "full"), "are not recomputed"),
        ({"optimizer": "adam_bf16_moments"}, LayerStrategy(1, 8, 0), "the distributed optimizer"),
        ({"optimizer": "lion"}, LayerStrategy(1, 8, 3), "its FSDP takes Adam only"),
    ],
)
def test_plans_on_which_megatron_asserts_are_refused(
    training: dict[str, Any], strategy: LayerStrategy, why: str
) -> None:
    problem = problem_of(tuple(LLAMA))
    job = replace(problem.config.training, **training)
    problem = replace(problem, config=replace(problem.config, training=job))
    with pytest.raises(UnsupportedError, match=why):
        export_plan(problem, plan_of(problem, strategy, 2), "megatron")


def test_torchtitan_refuses_parts_to_recompute_that_it_cannot_set() -> None:
    job = ["model=llama3_8b", "cluster=h100_1x8", "training.recompute_modules=[mlp]"]
    with pytest.raises(
        UnsupportedError, match=r"recompute_modules=\[mlp\], .*modules=\[core_attn\]\."
    ):
        require_trainers(load_problem([*job, "trainer=torchtitan"]))
    require_trainers(load_problem([*job, "trainer=megatron"]))
    require_trainers(load_problem(["model=mixtral_8x7b", "cluster=h100_8x8", "trainer=torchtitan"]))


def test_torchtitans_function_names_the_fields_of_its_source() -> None:
    def text(**training: Any) -> str:
        return files("torchtitan", **training)["torchtitan_plan.py"]

    usual = text()
    assert "config.compile.enable = False" in usual
    assert "config.training.disable_cuda_graphs = True" in usual
    assert "config.loss = ChunkedLossWrapper.Config(loss_fn=getattr(config.loss" in usual
    assert "ChunkedLossWrapper" not in text(loss="full")
    both = text(tp_comm_overlap=True)
    assert "config.compile.enable = True\n" in both
    assert "config.compile.enable_async_tensor_parallel = True\n" in both
    assert 'implementation = "fused_opt_states_bf16"' in text(optimizer="adam_bf16_moments")
    problem = problem_of((*LLAMA, "training.tp_comm_overlap=true"))
    with pytest.raises(UnsupportedError, match=r"compiled blocks; try training\.compiled=true"):
        export_plan(problem, plan_of(problem, LayerStrategy(1, 8), 2), "torchtitan")


def test_programs_on_transformers_load_what_is_priced() -> None:
    def text(trainer: str, **training: Any) -> str:
        return list(files(trainer, **training).values())[-1]

    for trainer in ("accelerate", "deepspeed"):
        assert "torch.optim.AdamW(trained" in text(trainer)
        assert 'attn_implementation="flash_attention_3"' in text(trainer, attention_kernel="fa3")
        assert "\nimport flash_attn_interface" in text(trainer, attention_kernel="fa3")
        assert "enable_flash_sdp(False)" in text(trainer, attention_kernel="cudnn")
        fused = text(trainer, loss="fused")
        assert "AutoLigerKernelForCausalLM.from_pretrained(" in fused
        assert "fused_linear_cross_entropy=True" in fused
        adapters = {"lora_rank": 8, "lora_dropout": 0.1, "frozen_bits": 4}
        made = text(trainer, **adapters)
        assert "LoraConfig(r=8, lora_dropout=0.1, target_modules=chosen)" in made
        assert "load_in_4bit=True" in made
        compile(made, "plan", "exec")
    # FSDP2 divides the state of torchao's optimizers, not that of bitsandbytes'
    assert "torchao.optim.AdamW8bit(" in text("accelerate", optimizer="adam_8bit")
    assert "bitsandbytes.optim.AdamW8bit(" in text("deepspeed", optimizer="adam_8bit")


@pytest.mark.parametrize("trainer", ["accelerate", "deepspeed"])
def test_adapters_are_those_of_products_that_the_model_has(trainer: str) -> None:
    """A file for Mixtral looked for an MLP outside of its experts, and stopped before the first step."""
    assert '"linear_fc1"' in str(files(trainer, lora_rank=8))
    made = [*MIXTURE, f"space.trainer={trainer}", "training.lora_rank=8"]
    problem = load_problem(made)
    text = str(export_plan(problem, plan_of(problem, LayerStrategy(1, 8, 0), 2), trainer).files)
    assert '"linear_qkv"' in text
    assert '"linear_fc1"' not in text
    with pytest.raises(
        ConfigError, match=r"lora_targets=\[linear_fc2\] must name a product outside"
    ):
        load_problem([*made, "training.lora_targets=[linear_fc2]"])


def test_accelerates_sharded_gradients_are_summed_in_32_bits_as_priced() -> None:
    """FSDP2 under accelerate 1.15 sums them in the type of its products (utils/dataclasses.py, line 2137)."""

    def text(zero: int, precision: str = "bf16") -> str:
        known = ["space.trainer=accelerate", "++cluster.devices.toy.peak_TFLOPs.fp16=1.0"]
        problem = load_problem([*LLAMA, *known, f"training.precision={precision}"])
        found = plan_of(problem, LayerStrategy(1, 8, zero), 2)
        return export_plan(problem, found, "accelerate").files["accelerate_plan.py"]

    for zero, precision in ((2, "bf16"), (3, "fp16")):
        types = {"bf16": "bfloat16", "fp16": "float16"}[precision]
        assert f"param_dtype=torch.{types}, reduce_dtype=torch.float32" in text(zero, precision)
        compile(text(zero, precision), "plan", "exec")
    assert "reduce_dtype" not in text(0)  # DDP sums float32 gradients


def test_frozen_weights_of_4_bits_are_multiplied_in_the_precision_of_the_job() -> None:
    assert "compute_dtype=torch.bfloat16, " in str(files("deepspeed", lora_rank=8, frozen_bits=4))
    known = ["space.trainer=deepspeed", "training.lora_rank=8", "training.frozen_bits=4"]
    known += ["++cluster.devices.toy.peak_TFLOPs.fp16=1.0", "training.precision=fp16"]
    problem = load_problem([*LLAMA, *known])
    half = export_plan(problem, plan_of(problem, LayerStrategy(1, 8, 0), 2), "deepspeed").files
    assert "compute_dtype=torch.float16, bnb_4bit_quant_storage=torch.float16)" in str(half)
    assert "bfloat16" not in str(half)


@pytest.mark.parametrize("trainer", ["accelerate", "deepspeed"])
@pytest.mark.parametrize("kernel", ["sdpa", "cudnn", "fa2", "fa3", "triton", "unfused"])
def test_learned_sinks_take_the_kernels_that_transformers_has_for_them(
    trainer: str, kernel: str
) -> None:
    job = [*LLAMA, "model.attention_sinks=true", f"training.attention_kernel={kernel}"]
    problem = load_problem([*job, f"space.trainer={trainer}"])
    found = plan_of(problem, LayerStrategy(1, 8, 0), 2)
    if kernel in ("fa3", "triton", "unfused"):
        assert export_plan(problem, found, trainer).files
    else:
        with pytest.raises(UnsupportedError, match=r"learned sinks; .*attention_kernel=triton"):
            export_plan(problem, found, trainer)


def device_of(*job: str) -> Any:
    return load_problem(["model=llama3_8b", "cluster=h100_1x8", *job]).cluster.groups[0].device


def test_an_attention_kernel_is_its_published_ratio_to_the_habit_of_the_framework() -> None:
    speeds = load_problem(["cluster=h100_1x8"]).config.cluster.devices["h100"].attention_TFLOPs
    for software, habit in (("megatron_core", "cudnn"), ("null", "fa2"), ("nanotron", "fa2")):
        usual = device_of(f"training.software={software}").attention_efficiency
        for kernel, speed in speeds.items():
            job = (f"training.software={software}", f"training.attention_kernel={kernel}")
            own = device_of(*job).attention_efficiency
            assert own / usual == pytest.approx(speed / speeds[habit])
    # FlashAttention 2 is 1.6 times as slow as cuDNN on Hopper
    assert speeds["cudnn"] / speeds["fa2"] == pytest.approx(1.62, abs=0.01)


def test_tensor_parallel_messages_are_hidden_only_where_they_overlap() -> None:
    for software in ("megatron_core", "null"):
        job = f"training.software={software}"
        average = device_of(job).tp_hidden_share
        assert device_of(job, "training.tp_comm_overlap=false").tp_hidden_share == 0.0
        shown = device_of(job, "training.tp_comm_overlap=true").tp_hidden_share
        assert 0.0 < average < shown == min(2.0 * average, 1.0)
    # recipes of NeMo overlap them
    nemo = device_of("training.software=nemo")
    assert nemo == device_of("training.software=nemo", "training.tp_comm_overlap=true")


def test_compiled_blocks_launch_fewer_kernels_and_move_fewer_bytes() -> None:
    plain = device_of("training.software=torchtitan", "training.compiled=false")
    made = device_of("training.software=torchtitan", "training.compiled=true")
    assert plain.layer_overhead / made.layer_overhead == pytest.approx(2.5)
    assert plain.streaming_factor / made.streaming_factor == pytest.approx(1.12 / 0.9)
    # what a framework usually does counts where the job does not say
    assert device_of("training.software=torchtitan") == plain
    with pytest.raises(ConfigError, match=r"torchtitan_compile must go with .*compiled=true"):
        device_of("training.software=torchtitan_compile", "training.compiled=false")


def test_without_a_known_switch_or_habit_every_figure_is_the_average() -> None:
    problem = load_problem(["model=llama3_8b", "cluster=h100_1x8"])
    assert not problem.software.job
    assert not problem.software.switch_factors({"fa2": 1.0})


def logit_bytes(*job: str) -> float:
    problem: Problem = load_problem(["model=llama3_8b", "cluster=h100_1x8", *job])
    return problem.software.loss_bytes


def test_the_loss_keeps_all_logits_an_eighth_of_them_or_none() -> None:
    assert logit_bytes() == logit_bytes("training.loss=full") == 6.0
    assert logit_bytes("training.loss=chunked") == 6.0 / 8
    # models of Hugging Face keep float32 logits and their softmax, under every trainer that loads one
    for trainer in ("accelerate", "deepspeed"):
        assert logit_bytes(f"trainer={trainer}") == 14.0
    assert logit_bytes("training.loss=fused") == 0.0
    # Megatron's fused loss keeps 16-bit logits and the softmax
    assert logit_bytes("training.loss=fused", "training.software=megatron_core") == 6.0


def test_the_old_key_is_refused_and_the_new_one_named() -> None:
    for key in ("training.fused_attention", "+training.fused_attention"):
        with pytest.raises(ConfigError, match="=null, or unfused where it was false"):
            load_problem([*LLAMA, f"{key}=true"])
    with pytest.raises(ConfigError, match="try adam_8bit"):
        load_problem([*LLAMA, "training.optimizer=adamw_8bit"])


def test_the_report_names_averages_and_what_a_switch_of_the_trainer_saves() -> None:
    job = ["model=llama3_8b", "cluster=h100_1x8", "space.pp=1"]
    generic = load_problem(job)
    (line,) = averaged_switches(generic)
    assert line.endswith("attention_kernel, tp_comm_overlap, compiled")
    plan = plan_of(generic, LayerStrategy(8, 1, 1, "full", True), 64)
    assert list(switch_savings(generic, plan)) == []
    megatron = load_problem([*job, "trainer=megatron"])
    lines = list(switch_savings(megatron, plan))
    changed = load_problem([*job, "trainer=megatron", "training.tp_comm_overlap=true"])
    seconds = [evaluate(plan, own).iteration_time_s for own in (megatron, changed)]
    saved = 100.0 * (1.0 - seconds[1] / seconds[0])
    expected = f"training.tp_comm_overlap=true would save {saved:.1f} % of this plan's time"
    assert expected in lines
    assert saved > 1.0
    # an overlap wants sequence parallelism
    split = plan_of(generic, LayerStrategy(8, 1, 1, "full"), 64)
    assert not any("tp_comm_overlap" in line for line in switch_savings(megatron, split))


def test_a_switch_of_a_late_release_is_named_with_it() -> None:
    """The report proposed flash attention 3 without a word of the release that has the flag."""
    job = ["model=llama3_8b", "cluster=h100_1x8", "trainer=megatron"]
    problem = load_problem(job)
    plan = plan_of(problem, LayerStrategy(1, 8, 1), 64)
    saved = [line for line in switch_savings(problem, plan) if "attention_kernel=fa3" in line]
    assert [line.endswith("% of this plan's time (from release 0.19 on)") for line in saved] == [
        True
    ]
