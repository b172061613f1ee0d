import json
import random
from pathlib import Path
from time import sleep
from typing import Any

import pytest
import torch
import yaml

from darts_parallel import load_problem
from darts_parallel.config.options import parse
from darts_parallel.cost.compute import gemm_seconds
from darts_parallel.errors import ConfigError
from darts_parallel.machine._compute import (
    MOST_EXTRAPOLATED,
    GemmTime,
    fit_gemms,
    gemm_shapes,
)
from darts_parallel.machine._files import Profile, device_yaml
from darts_parallel.machine._links import MessageTime, fit_link
from darts_parallel.machine._timing import MeasuredMachine
from darts_parallel.machine.command import ProfileOptions, run
from darts_parallel.plans.space import outer_spaces
from darts_parallel.problem.cluster import Device, Link
from darts_parallel.problem.layer_spec import Gemm
from tests.support.processes import run_ranks

DEVICE = Device(
    name="known",
    memory=0.0,
    peak_flops=2e12,
    memory_bandwidth=1e11,
    gemm_efficiency=0.7,
    gemm_half_size=128.0,
    attention_efficiency=1.0,
    memory_efficiency=0.8,
    layer_overhead=0.0,
    overlap_exponent=2.0,
    reserved=0.0,
)


def test_seconds_are_those_of_one_run(capsys: pytest.CaptureFixture[str]) -> None:
    machine = MeasuredMachine(torch.device("cpu"), 0, 1, 1)
    short, long = machine.measure("sleep", [lambda: sleep(0.002), lambda: sleep(0.02)], 0.0)
    assert 0.002 <= short < long
    assert long >= 0.02
    assert "sleep: 2 cases" in capsys.readouterr().out


def test_the_fit_of_products_finds_the_device_that_made_them() -> None:
    one = torch.ones((), dtype=torch.float64)

    def made(precision: str, width: int, speed: float, shape: tuple[int, int, int]) -> GemmTime:
        rows, inner, columns = shape
        seconds = gemm_seconds(Gemm(columns, inner, "column"), rows * one, one, DEVICE, width)
        return GemmTime(precision, *shape, float(seconds) / speed)

    shapes = gemm_shapes(4096)
    gemms = [made("fp32", 4, 1.0, shape) for shape in shapes] + [
        made("bf16", 2, 3.0, shape) for shape in shapes
    ]
    fitted = fit_gemms(gemms, DEVICE)
    device, peaks = fitted.device, fitted.peaks
    assert float(device.gemm_half_size) == pytest.approx(128.0, rel=1e-9)
    assert float(device.peak_flops) * float(device.gemm_efficiency) == pytest.approx(
        1.4e12, rel=1e-9
    )
    assert fitted.error < 1e-9
    assert peaks["bf16"] == pytest.approx(3 * peaks["fp32"], rel=1e-9)
    # no measured product is faster than the peak
    assert max(gemm.flops_per_s for gemm in gemms) <= max(peaks.values()) * (1 + 1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_products_that_only_take_their_launch_do_not_claim_a_peak_far_above_the_fastest(
    seed: int,
) -> None:
    generator = random.Random(seed)

    def launched(precision: str) -> list[GemmTime]:
        return [
            GemmTime(precision, *shape, generator.uniform(1e-5, 1.5e-5))
            for shape in gemm_shapes(64)
        ]

    products = {precision: launched(precision) for precision in ("fp32", "bf16")}
    fitted = fit_gemms(products["fp32"] + products["bf16"], DEVICE)
    for precision, some in products.items():
        fastest = max(product.flops_per_s for product in some)
        assert fastest <= fitted.peaks[precision] <= MOST_EXTRAPOLATED * fastest
    assert float(fitted.device.peak_flops) == fitted.peaks["fp32"]
    machine = MeasuredMachine(torch.device("cpu"), 0, 1, 1)
    text = device_yaml(Profile("own", machine, fitted, (), "today"), (2.0**30, 2.0**20))
    assert f"# at most {MOST_EXTRAPOLATED:g} times the fastest" in text
    assert yaml.safe_load(text)["peak_TFLOPs"]["fp32"] == pytest.approx(
        fitted.peaks["fp32"] / 1e12, rel=1e-5
    )


@pytest.mark.parametrize(("bandwidth", "latency"), [(2e9, 3e-5), (1e11, 0.0)])
def test_the_fit_of_messages_finds_bandwidth_and_latency(bandwidth: float, latency: float) -> None:
    times = [
        MessageTime("all-reduce", size, 1.5 * size, 6.0, 1.5 * size / bandwidth + 6 * latency)
        for size in (2**10, 2**14, 2**18, 2**22)
    ]
    link = fit_link(times)
    assert link.bandwidth == pytest.approx(bandwidth, rel=1e-9)
    assert link.latency == pytest.approx(latency, rel=1e-9, abs=1e-15)
    assert link.error < 1e-9


def test_messages_whose_time_falls_with_size_still_have_a_positive_bandwidth() -> None:
    link = fit_link([MessageTime("message", 2**i, 2.0**i, 1.0, 1e-3 / i) for i in range(10, 14)])
    assert link.bandwidth > 0
    assert link.latency > 0


@pytest.mark.parametrize(
    ("argument", "sentence"),
    [
        ("device=tpu", "device=tpu must be one of auto, cpu, cuda"),
        ("precisions=[fp8]", "precisions=fp8 must be one of fp32, bf16, fp16"),
        ("largest=8", "largest=8 must be at least 64"),
        ("name=my-machine", "name=my-machine must be letters"),
    ],
)
def test_what_cannot_be_measured_is_refused(argument: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(ProfileOptions, [argument])
    assert sentence in str(caught.value)
    assert "; try " in str(caught.value)


SMALL = ("device=cpu", "seconds=0", "largest=64", "largest_message_mib=0.02")


def planned_for(folder: Path, printed: str, processes: int) -> tuple[dict[str, Any], Link]:
    """The measurements and the link of a machine, which must be one that a plan can be made for."""
    problem = load_problem(
        ["model=toy", "training=toy", "training.precision=fp32", "cluster=measured"],
        config_dir=str(folder),
    )
    assert problem.cluster.num_devices == processes
    assert outer_spaces(problem)
    group = problem.cluster.groups[0]
    assert 1e7 < float(group.device.peak_flops) < 1e14
    assert group.device.memory > group.device.reserved > 0
    assert (group.device.overlap_exponent, group.device.tp_hidden_share) == (
        1.0,
        0.0,
    )  # gloo hides nothing
    assert "gemm_*: fitted to the products" in printed
    data = json.loads((folder / "profile.json").read_text())
    assert len(data["gemms"]) == len(gemm_shapes(64))
    return data, group.intra_node


def test_a_measured_device_can_be_planned_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(parse(ProfileOptions, [*SMALL, f"out={tmp_path}"])) == 0
    data, _ = planned_for(tmp_path, capsys.readouterr().out, 1)
    assert data["intra_node"] is None


def measure(*arguments: str) -> None:
    """A job of every process."""
    run(parse(ProfileOptions, arguments))


def test_measured_processes_and_their_links_can_be_planned_for(tmp_path: Path) -> None:
    printed, nothing = run_ranks(2, tmp_path, measure, *SMALL, f"out={tmp_path}")
    assert nothing == ""
    data, link = planned_for(tmp_path, printed, 2)
    operations = {time["operation"] for time in data["intra_node"]["times"]}
    assert operations == {"all-reduce", "all-gather", "there and back"}
    assert float(link.bandwidth) == pytest.approx(data["intra_node"]["bandwidth"], rel=1e-4)
