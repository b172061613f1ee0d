"""Changes by a training framework: its figures on a device, and what it sends."""

from dataclasses import replace
from math import log
from pathlib import Path

import pytest

from darts_parallel.config.composition import load_config
from darts_parallel.config.trainer import group_names
from darts_parallel.cost.compute import CAST_BYTES, weight_cast_seconds
from darts_parallel.cost.evaluation import evaluate
from darts_parallel.errors import ConfigError
from darts_parallel.plans.strategy import LayerStrategy, Plan
from darts_parallel.problem.problem import Problem, load_problem
from darts_parallel.problem.software import ANY, COMMON, Software, read_software

JOB = ["model=toy", "cluster=toy", "training=toy", "cluster.nodes.0.count=1"]


def plan_of(problem: Problem, zero: int) -> Plan:
    layers = problem.num_layers
    return Plan(1, (0, layers), (LayerStrategy(1, problem.cluster.num_devices, zero),) * layers)


def seconds(problem: Problem, software: Software, zero: int = 1) -> float:
    return evaluate(plan_of(problem, zero), replace(problem, software=software)).iteration_time_s


def test_every_shipped_software_is_read_and_changes_a_device() -> None:
    device = load_config(["cluster=h100_1x8"]).cluster.devices["h100"]
    for name in group_names("software"):
        software = read_software(name)
        assert software.name == name
        assert software.on("h100", device) != device
    assert COMMON.on("h100", device) is device
    assert {"megatron_core", "nemo", "torchtitan", "deepspeed", "nanotron"} <= set(
        group_names("software")
    )


def test_offsets_belong_to_the_device_else_to_any() -> None:
    device = load_config(["cluster=h100_1x8"]).cluster.devices["h100"]
    software = Software(
        "s", values={"layer_overhead_us": 7.0}, offsets={"gemm_efficiency": {ANY: 0.1, "h100": 0.5}}
    )
    share = device.gemm_efficiency
    for name, offset in (("h100", 0.5), ("b200", 0.1)):
        new = software.on(name, device)
        assert new.layer_overhead_us == 7.0
        logit = log(new.gemm_efficiency / (1 - new.gemm_efficiency)) - log(share / (1 - share))
        assert logit == pytest.approx(offset)


def test_what_a_framework_keeps_grows_with_the_gpu_and_the_context_does_not() -> None:
    device = load_config(["cluster=h100_1x8"]).cluster.devices["h100"]
    software = Software("s", reserved_factor=3.0)
    for shown, kept in ((1.0, 1.0), (0.5, 0.5), (2.5, 5.5)):
        own = software.on("h100", replace(device, reserved_GiB=shown))
        assert own.reserved_GiB == pytest.approx(kept)
    # a GPU that a user describes has a share of its memory
    usual = replace(device, reserved_GiB=None)
    grown = software.on("h100", usual).kept_gib
    assert grown - 1.0 == pytest.approx(software.reserved_factor * (usual.kept_gib - 1.0))
    # a user's file of an earlier version names the bytes themselves
    given = replace(software, values={"reserved_GiB": 2.0}, reserved_factor=1.0)
    assert given.on("h100", device).reserved_GiB == 2.0


def test_an_unknown_software_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"software=megatron-core .*try megatron_core"):
        load_problem([*JOB, "training.software=megatron-core"])


def test_gradients_of_16_bits_take_half_the_wire_and_owners_are_waited_for() -> None:
    problem = load_problem([*JOB, "training.precision=bf16"])
    whole, half = seconds(problem, COMMON), seconds(problem, Software(gradient_bits=16))
    assert half < whole
    assert seconds(problem, Software(gradient_bits=32)) == whole
    held = [
        evaluate(plan_of(problem, 0), replace(problem, software=own)).memory_bytes[0]
        for own in (COMMON, Software(gradient_bits=16))
    ]
    assert held[0] - held[1] == pytest.approx(2.0 * problem.model.num_parameters, rel=0.05)
    asked = load_problem([*JOB, "training.precision=bf16", "training.gradient_bits=16"])
    assert seconds(asked, asked.software) == half
    owners = problem.cluster.num_devices
    # broadcasts come before the next forward pass, not next to it
    waited = seconds(problem, Software(owner_broadcast_ms=1e-9))
    assert waited > whole * (1 + 1e-3)
    waiting = seconds(problem, Software(owner_broadcast_ms=2.7))
    assert waiting - waited == pytest.approx(owners * 2.7e-3, rel=1e-3)
    assert seconds(problem, Software(owner_broadcast_ms=2.7), zero=0) == seconds(
        problem, COMMON, zero=0
    )


def test_products_that_add_gradients_themselves_leave_no_sum() -> None:
    problem = load_problem([*JOB, "training.precision=bf16"])
    fused = Software(fused_accumulation=True)
    device = problem.cluster.groups[0].device
    moved = problem.model.num_parameters * (2 * 4 + 2)
    once = moved / float(device.memory_bandwidth * device.memory_efficiency)
    saved = seconds(problem, COMMON) - seconds(problem, fused)
    assert saved == pytest.approx(once * plan_of(problem, 1).num_micro_batches, rel=0.05)


def test_weights_are_cast_once_an_iteration_whatever_the_micro_batches() -> None:
    problem = load_problem(
        ["model=llama3_8b", "training=llama3_8b", "cluster=h100_1x8", "training.precision=fp8"]
    )
    device = problem.cluster.groups[0].device
    block = problem.model.layers[1]
    one = float(weight_cast_seconds(block, 1.0, device))  # type: ignore[arg-type]
    elements = sum(g.out_features * g.in_features for g in block.gemms)
    assert one == pytest.approx(
        CAST_BYTES * elements / float(device.memory_bandwidth * device.memory_efficiency)
    )
    sixteen = load_problem(["model=llama3_8b", "training=llama3_8b", "cluster=h100_1x8"])
    assert float(weight_cast_seconds(block, 1.0, sixteen.cluster.groups[0].device)) == 0.0  # type: ignore[arg-type]


def test_an_own_file_of_config_dir_is_read_and_stored_with_the_job(tmp_path: Path) -> None:
    (tmp_path / "software").mkdir()
    (tmp_path / "software/mine.yaml").write_text("loss_bytes: 0.1\nstreaming_factor: 2.0\n")
    problem = load_problem([*JOB, "training.software=mine"], str(tmp_path))
    assert problem.software.loss_bytes == 0.1
    assert problem.cluster.groups[0].device.streaming_factor == 2.0
    # a plan.json keeps the figures, so that it needs the folder no more
    assert problem.config.own_software == {"loss_bytes": 0.1, "streaming_factor": 2.0}
    assert Problem.from_config(problem.config).software == problem.software
    (tmp_path / "software/mine.yaml").write_text("speed: 2.0\n")
    with pytest.raises(ConfigError, match=r"software/mine.yaml: speed is not a field"):
        load_problem([*JOB, "training.software=mine"], str(tmp_path))
