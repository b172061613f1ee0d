"""Numbers that no machine has, and values that a merge would swallow, are refused in one sentence."""

from dataclasses import fields
from math import inf
from typing import get_args

import pytest

from darts_parallel.config.bilevel import BilevelConfig
from darts_parallel.config.cluster import ClusterConfig, DeviceConfig, LinkConfig, NodeGroupConfig
from darts_parallel.config.composition import refuse_silent_overrides
from darts_parallel.config.model import ModelConfig
from darts_parallel.config.schema import (
    CostConfig,
    ObjectiveConfig,
    SpaceConfig,
    VerificationConfig,
)
from darts_parallel.config.search import SearchConfig
from darts_parallel.config.training import TrainingConfig
from darts_parallel.errors import ConfigError

KINDS = (
    DeviceConfig,
    LinkConfig,
    NodeGroupConfig,
    ModelConfig,
    TrainingConfig,
    SpaceConfig,
    CostConfig,
    ObjectiveConfig,
    VerificationConfig,
    SearchConfig,
    BilevelConfig,
)
DEVICE = {"memory_GiB": 80.0, "peak_TFLOPs": {"bf16": 100.0}, "memory_bandwidth_GBps": 1000.0}


DEVICE_RANGES, SEARCH_RANGES = (
    {entry.name: entry.metadata["range"] for entry in fields(kind) if "range" in entry.metadata}
    for kind in (DeviceConfig, SearchConfig)
)
DEVICE_RANGES.pop("peak_TFLOPs")  # one for each precision


@pytest.mark.parametrize("kind", KINDS)
def test_every_number_has_a_range_and_every_default_lies_in_it(kind: type) -> None:
    for entry in fields(kind):
        if {entry.type, *get_args(entry.type)} & {float, int}:
            assert "range" in entry.metadata or "members" in entry.metadata, entry.name
            least, most = entry.metadata.get("range", (-inf, inf))
            assert least < most
            assert not isinstance(entry.default, (float, int)) or least <= entry.default <= most


@pytest.mark.parametrize("key", DEVICE_RANGES)
@pytest.mark.parametrize("value", [1e300, -1e300, 1e-300, float("nan"), float("inf")])
def test_a_device_with_an_absurd_figure_is_refused(key: str, value: float) -> None:
    least, _ = DEVICE_RANGES[key]
    if least <= value <= 1e-300:
        return  # nearly nothing is legal where nothing is
    mine = {"mine": DeviceConfig(**{**DEVICE, key: value})}
    link = LinkConfig(100.0, 1.0)
    with pytest.raises(ConfigError, match=rf"^cluster\.devices\.mine\.{key}=.* must .*try "):
        ClusterConfig("one", [NodeGroupConfig(1, 2, "mine", link)], link, mine)


@pytest.mark.parametrize("key", SEARCH_RANGES)
def test_a_search_with_an_absurd_setting_is_refused(key: str) -> None:
    for value in (1e300, -1.0):
        with pytest.raises(ConfigError, match=rf"search\.{key}=.*; try "):
            SearchConfig(**{key: value})


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("cluster.devices={}", "would change nothing"),
        ("cluster.devices.toy.peak_TFLOPs={ }", "would change nothing"),
        ("verification.enabled=2", "must be true or false; try true"),
        ("cluster.nodes.0.intra_node.shared=0.5", "must be true or false"),
    ],
)
def test_what_a_merge_would_swallow_is_refused(override: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        refuse_silent_overrides([override])


def test_only_the_override_that_a_merge_would_swallow_is_named() -> None:
    """Values that say what they mean pass, whether it stands before or after one that does not."""
    good = ["verification.enabled=1", "output.progress=0", "space.pp=4", "model=toy", "~plan"]
    with pytest.raises(ConfigError, match=r"^cluster\.devices=") as refused:
        refuse_silent_overrides([*good, "cluster.devices={}", *good])
    assert not any(override.partition("=")[0] in str(refused.value) for override in good[:-1])
