"""Files that commit 8f9112a wrote are read and priced; keys that a user types are refused."""

import json
import re
from typing import Any

import pytest
import yaml

from darts_parallel.config._keys import all_keys, type_at
from darts_parallel.config.old_keys import OLD_KEYS, OldKey
from darts_parallel.config.schema import Config
from tests.support.commands import QUIET, Command
from tests.support.sources import ROOT

OLD_FILES = ROOT / "tests/golden/old"
"""Files as commit 8f9112a wrote them."""
PLANS = ("lora", "searched", "bilevel", "train_torch")
INVENTED = (
    OldKey("search.momentum"),
    OldKey("cost.messages", "p2p", {"waiting": "blocking"}),
    OldKey("cluster.devices.*.bias", "gemm_efficiency"),
)
"""Keys of no version, so that the tests hold whatever the table says."""


def told(error_output: str) -> list[str]:
    """List the lines that speak of an earlier version."""
    return [line for line in error_output.splitlines() if "of an earlier version" in line]


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_of_8f9112a_is_priced(name: str, command: Command) -> None:
    source = OLD_FILES / f"{name}.json"
    done = command(f"plan={source}", *QUIET, "hydra.run.dir=priced")
    assert done.status == 0, done.err
    old = json.loads(source.read_text())
    new = json.loads((command.folder / "priced/plan.json").read_text())
    assert new["layers"] == old["layers"]
    assert new["stages"] == old["stages"]
    assert len(told(done.err)) <= 1
    if "predicted" in old:
        seconds = old["predicted"]["iteration_time_s"]
        assert new["predicted"]["iteration_time_s"] == pytest.approx(
            seconds, rel=0.2
        )  # refits move prices


def test_a_tuned_folder_of_8f9112a_is_planned_with(command: Command) -> None:
    arguments = ("model=toy", "cluster=toy_common", "training=toy", "search.num_steps=10", *QUIET)
    done = command(f"--config-dir={OLD_FILES / 'tuned'}", *arguments, "hydra.run.dir=found")
    assert done.status == 0, done.err
    assert len(told(done.err)) <= 1
    found = json.loads((command.folder / "found/plan.json").read_text())
    kept = yaml.safe_load((OLD_FILES / "tuned/cluster/toy_common.yaml").read_text())
    efficiency = kept["devices"]["toy"]["gemm_efficiency"]
    assert found["cluster"]["devices"]["toy"]["gemm_efficiency"] == efficiency


@pytest.fixture
def invented(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the table hold `INVENTED`, too."""
    table = (*OLD_KEYS, *INVENTED)
    monkeypatch.setattr("darts_parallel.config.old_keys.OLD_KEYS", table)


@pytest.mark.usefixtures("invented")
@pytest.mark.parametrize("name", ["lora", "train_torch"])
def test_old_keys_of_a_plan_are_translated_and_one_line_says_so(
    name: str, command: Command
) -> None:
    data: dict[str, Any] = json.loads((OLD_FILES / f"{name}.json").read_text())
    data["config"]["search"]["momentum"] = 0.5
    data["config"]["cost"]["messages"] = "waiting"
    del data["config"]["cost"]["p2p"]
    (command.folder / "old.json").write_text(json.dumps(data))
    done = command("plan=old.json", *QUIET, "hydra.run.dir=priced")
    assert done.status == 0, done.err
    changes = "cost.messages=waiting is read as cost.p2p=blocking; search.momentum is ignored"
    (line,) = told(done.err)
    assert line.startswith("plan=old.json is of an earlier version: ")
    said = line.partition(": ")[2].removesuffix(".").split("; ")
    assert set(said) >= set(changes.split("; "))


@pytest.mark.usefixtures("invented")
def test_old_keys_of_a_folder_are_translated(command: Command) -> None:
    cluster = yaml.safe_load((OLD_FILES / "tuned/cluster/toy_common.yaml").read_text())
    device = cluster["devices"]["toy"]
    device["bias"] = device.pop("gemm_efficiency")
    (command.folder / "own/cluster").mkdir(parents=True)
    (command.folder / "own/cluster/mine.yaml").write_text(yaml.safe_dump(cluster))
    done = command("--config-dir=own", "model=toy", "training=toy", "cluster=mine", "--cfg=job")
    assert done.status == 0, done.err
    (line,) = told(done.err)
    assert "cluster/mine.yaml is of an earlier version: cluster.devices.toy.bias=0.73" in line
    assert f"gemm_efficiency: {device['bias']}" in done.out


@pytest.mark.usefixtures("invented")
def test_an_old_key_that_a_user_types_is_refused(command: Command) -> None:
    source = OLD_FILES / "lora.json"
    for first in ((), (f"plan={source}",)):
        done = command(*first, "search.momentum=0.5", *QUIET)
        assert done.status == 2
        assert re.search(r"search\.momentum.*; try ", done.err)


def test_the_table_names_no_key_of_today_as_removed() -> None:
    known = {key.replace("[]", ".*") for key in all_keys(Config)}
    for old in OLD_KEYS:
        place = old.key.rpartition(".")[0]
        if old.new_name is None:
            assert old.key not in known
        else:
            assert type_at(f"{place}.{old.new_name}".replace("*", "0"), Config) is not None
            assert old.key not in known or old.new_values
