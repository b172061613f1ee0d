"""The page of switches: every value with its seconds and the lines that only its files have."""

import pytest

from darts_parallel.config import read_trainer
from experiments import trainer_switches


def test_every_value_has_seconds_and_lines_or_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_switches, "MODELS", ("toy",))
    monkeypatch.setattr(trainer_switches, "PINNED", {})
    search = ("cluster=toy", "cluster.devices.toy.memory_GiB=6", "search=exact", "space.pp=1")
    search += ("space.zero_stage=1",)
    monkeypatch.setattr(trainer_switches, "SEARCH", search)
    rows = {row.switch: row for row in trainer_switches.read_trainer_rows("megatron")}
    known = {k: v for k, v in read_trainer("megatron").switches.items() if "moe" not in k}
    assert len(rows) == sum(len(values) for values in known.values())
    assert rows["attention_kernel=cudnn"].lines == "--attention-backend fused"
    assert "--flash-attention-version 3" in rows["attention_kernel=fa3"].lines
    assert rows["loss=full"].lines == "no line"
    assert rows["loss=fused"].lines.startswith("--cross-entropy-loss-fusion")
    assert rows["cuda_graphs=full_iteration"].seconds < rows["cuda_graphs=none"].seconds
    refused = rows["optimizer=sgd"]
    assert refused.seconds == 0.0
    assert "takes Adam only" in refused.lines
    assert "optimizer=sgd" in trainer_switches.report(list(rows.values()))
