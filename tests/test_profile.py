import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from darts_parallel import load_problem
from darts_parallel.cluster import Device
from darts_parallel.compute import gemm_seconds
from darts_parallel.errors import ConfigError
from darts_parallel.measuring import interleaved_medians
from darts_parallel.model import Gemm
from darts_parallel.space import outer_spaces
from experiments.options import parse
from experiments.profile import ProfileOptions
from experiments.profile_compute import GemmTime, fit_gemms, gemm_shapes
from experiments.profile_links import MessageTime, fit_link

DEVICE = Device(
    name="known", memory=0.0, peak_flops=2e12, memory_bandwidth=1e11, gemm_efficiency=0.7,
    gemm_half_size=128.0, attention_efficiency=1.0, memory_efficiency=0.8, layer_overhead=0.0,
    overlap_exponent=2.0, reserved=0.0,
)  # fmt: skip


def test_cases_run_in_turn_after_a_warm_up_and_one_disturbed_round_does_not_show() -> None:
    order: list[int] = []

    def case(number: int) -> list[float]:
        order.append(number)
        return [100.0 if order.count(number) == 3 else float(number), 2.0 * number]

    medians = interleaved_medians([lambda: case(1), lambda: case(5)], lambda done: done < 3)
    assert order == [1, 5] * 4
    assert medians == [(1.0, 2.0), (5.0, 10.0)]


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
    device, peaks, error = fit_gemms(gemms, DEVICE)
    assert float(device.gemm_half_size) == pytest.approx(128.0, rel=1e-9)
    assert float(device.peak_flops) * float(device.gemm_efficiency) == pytest.approx(1.4e12, rel=1e-9)
    assert error < 1e-9
    assert peaks["bf16"] == pytest.approx(3 * peaks["fp32"], rel=1e-9)
    # no measured product is faster than the peak
    assert max(gemm.flops_per_s for gemm in gemms) <= max(peaks.values()) * (1 + 1e-12)


@pytest.mark.parametrize(("bandwidth", "latency"), [(2e9, 3e-5), (1e11, 0.0)])
def test_the_fit_of_messages_finds_bandwidth_and_latency(bandwidth: float, latency: float) -> None:
    times = [
        MessageTime("all-reduce", size, 1.5 * size / bandwidth + 6 * latency, 1.5 * size, 6.0)
        for size in (2**10, 2**14, 2**18, 2**22)
    ]
    link = fit_link(times)
    assert link.bandwidth == pytest.approx(bandwidth, rel=1e-9)
    assert link.latency == pytest.approx(latency, rel=1e-9, abs=1e-15)
    assert link.error < 1e-9


def test_messages_whose_time_falls_with_size_still_have_a_positive_bandwidth() -> None:
    link = fit_link([MessageTime("message", 2**i, 1e-3 / i, 2.0**i, 1.0) for i in range(10, 14)])
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
    assert "nearest legal" in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_measured_machine_can_be_planned_for(tmp_path: Path, processes: int) -> None:
    start = (
        []
        if processes == 1
        else ["torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "-m"]
    )
    given = ["device=cpu", "seconds=0", "largest=64", "largest_message_mib=0.02", f"out={tmp_path / 'here'}"]
    command = [sys.executable, "-m", *start, "experiments.profile", *given]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    problem = load_problem(
        ["model=toy", "training=toy", "training.precision=fp32", "cluster=measured"],
        config_dir=str(tmp_path / "here"),
    )
    assert problem.cluster.num_devices == processes
    assert outer_spaces(problem)
    device = problem.cluster.groups[0].device
    assert 1e7 < float(device.peak_flops) < 1e14
    assert device.memory > device.reserved > 0
    link, data = (
        problem.cluster.groups[0].intra_node,
        json.loads((tmp_path / "here" / "profile.json").read_text()),
    )
    if processes == 1:
        assert data["intra_node"] is None
    else:
        operations = {time["operation"] for time in data["intra_node"]["times"]}
        assert operations == {"all-reduce", "all-gather", "there and back"}
        assert float(link.bandwidth) == pytest.approx(data["intra_node"]["bandwidth"], rel=1e-4)
    assert "block of width 16" in done.stdout
    assert len(data["gemms"]) == len(gemm_shapes(64))
