"""`cluster=box gpu=NAME gpus=N nodes=N` describes a machine in one line."""

import shlex

import pytest

from darts_parallel.config.composition import load_config
from darts_parallel.config.words import NAMES
from darts_parallel.errors import ConfigError
from tests.support.commands import QUIET, Command

DEVICES = ("a6000", "b300", "h100_pcie", "l40s", "mi325x", "t4", "v100_16")


@pytest.mark.parametrize("gpu", DEVICES)
def test_every_device_makes_a_machine(gpu: str) -> None:
    precision = "training.precision=fp16"
    cluster = load_config(["cluster=box", f"gpu={gpu}", "gpus=4", "nodes=2", precision]).cluster
    (node,) = cluster.nodes
    assert (node.count, node.gpus, node.device) == (2, 4, gpu)
    assert cluster.name == f"2x4_{gpu}"
    assert set(cluster.devices) == {gpu}


def test_links_are_those_of_the_class_of_the_device_or_given() -> None:
    """SXM boards have NVLink; a GeForce shares PCIe 4.0 x16, 25 GB/s."""
    nvlink = load_config(["cluster=box", "gpu=h200"]).cluster
    assert (
        nvlink.nodes[0].intra_node == load_config(["cluster=h100_8x8"]).cluster.nodes[0].intra_node
    )
    bus = load_config(["cluster=box", "gpu=rtx4090"]).cluster.nodes[0].intra_node
    assert (bus.bandwidth_GBps, bus.shared) == (25.0, True)
    key = "cluster.inter_node.bandwidth_GBps"
    assert (
        load_config(["cluster=box", "gpu=h200", f"{key}=50"]).cluster.inter_node.bandwidth_GBps
        == 50
    )


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["cluster=box", "gpu=rtx409"], "try gpu=rtx4090"),
        (["cluster=box"], "cluster=box needs gpu=, one of"),
        (["cluster=box"], "try gpu=h100"),
        (["cluster=box", "gpu=RTX 4090"], "gpu=RTX 4090 must be one of"),
        (["cluster=box", "gpu=RTX 4090"], "try gpu=rtx4090"),
        (["cluster=box", "gpu=4090"], "try gpu=rtx4090"),
        # 400 GB/s of NVLink both ways, where H100 and A100 have 900 and 600
        (["cluster=box", "gpu=H800"], "gpu=h100 cluster.nodes.0.intra_node.bandwidth_GBps=200"),
        (["cluster=box", "gpu=a800"], "gpu=a100_80 cluster.nodes.0.intra_node.bandwidth_GBps=200"),
        (["cluster=box", "gpu=H100-SXM5-80GB"], "try gpu=h100, or"),
        (["cluster=box", "gpu=NVIDIA H100 80GB HBM3"], "try gpu=h100, or"),
        (["cluster=box", "gpu=Tesla V100-SXM2-32GB"], "try gpu=v100, or"),
        (["cluster=box", "gpu=AMD Instinct MI300X OAM"], "try gpu=mi300x, or"),
        (["cluster=box", "gpu=a10g"], 'gpu=a10 "cluster.devices.a10.peak_TFLOPs={bf16: 70, fp16'),
        (["cluster=box", "gpu=h20"], '"cluster.devices.h100.peak_TFLOPs={bf16: 148, fp16: 148,'),
        (["cluster=box", "gpu=rtx_a6000"], "try gpu=a6000,"),
        (["cluster=box", "gpu=RTX-6000-Ada"], "try gpu=l40s cluster.devices.l40s.memory_band"),
        (["cluster=box", "gpu=tpu_v5p"], "for another GPU a file of your own (docs/how-to/own-"),
        (["gpu=h100"], "try cluster=box gpu=h100 gpus=8 nodes=1."),
        (["gpu=h100", "nodes=256"], "try cluster=box gpu=h100 gpus=8 nodes=256."),
        (["cluster=box", "gpu=h100", "gpus=64"], "try nodes=8"),
    ],
)
def test_other_words_are_refused(words: list[str], sentence: str, command: Command) -> None:
    done = command(*words)
    assert done.status == 2
    assert sentence in done.err
    assert done.files == ()


@pytest.mark.parametrize("name", ["h20", "gh200", "a30", "a40", "l40"])
def test_the_answer_to_another_gpu_is_a_command_that_works(name: str) -> None:
    answer = shlex.split(NAMES["gpus"][name])
    box = load_config(["cluster=box", f"gpu={answer[0]}", "gpus=4", "nodes=1", *answer[1:]])
    assert box.cluster.devices.keys() == {answer[0]}


def test_assumed_links_stand_on_the_second_line(command: Command) -> None:
    few = ("space=uniform", "search.num_steps=2", "search.num_restarts=1", "model=toy")
    box = ("cluster=box", "gpu=rtx4090", "gpus=2", "nodes=2", "cluster.inter_node.bandwidth_GBps=3")
    done = command(*few, *box, *QUIET)
    assert done.status == 0, done.err
    first, second, third, *_ = done.out.splitlines()
    assert "on 2x2_rtx4090, 4 GPUs" in first
    assert (
        second == "assumed: 25 GB/s inside a node; set cluster.nodes.0.intra_node.bandwidth_GBps="
    )
    assert "assumed" not in third
    alone = command(*few, *box[:2], "gpus=1", "nodes=1", "gbs=8", *QUIET).out.splitlines()
    assert alone[0].endswith(" on 1x1_rtx4090, 1 GPU")
    assert "assumed" not in alone[1]  # it has no link to another GPU
    with pytest.raises(ConfigError):
        load_config([*few, "gpu=h100"])
