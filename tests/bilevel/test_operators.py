"""Operators and weights that move together, on the toy Transformer's block."""

from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from darts_parallel.bilevel.operators import DEFAULTS, OperatorSearch
from darts_parallel.bilevel.settings import BilevelSettings
from darts_parallel.graph import make_mesh
from darts_parallel.problem.problem import load_problem
from darts_parallel.report.curves import SearchCurves


@pytest.mark.parametrize(("price", "gains"), [(0.0, True), (1.0, False)])
def test_what_bits_cost_decides_what_operators_split(
    price: float, gains: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(OperatorSearch, "slowdown", lambda _, plans, *more: [price] * len(plans))
    problem = load_problem([*DEFAULTS, "bilevel.num_steps=3", "bilevel.warmup_steps=0"])
    settings, mesh = BilevelSettings.of(problem), make_mesh(problem.cluster, (4,))
    text = torch.randint(
        0, 256, (5000,), generator=torch.Generator().manual_seed(0), dtype=torch.uint8
    )
    search = OperatorSearch(settings, mesh, (16, 4), text)
    curves = SearchCurves(tmp_path)
    search.run(curves)
    curves.writer.close()
    run = EventAccumulator(str(tmp_path)).Reload()
    assert "probability/all_layers" in run.Tags()["images"]
    assert "search/entropy" in run.Tags()["scalars"]
    odds = [tag for tag in run.Tags()["scalars"] if tag.startswith("probability/layer_linear_3/")]
    assert len(run.Scalars(odds[0])) == settings.num_steps
    plan = search.entry(search.improved())
    assert bool(plan["sums"]) == gains
    assert plan["time_ratio"] < 0.9 if gains else plan["time_ratio"] == pytest.approx(1.0)
    wanted = "heads" if gains else "batch0"
    assert plan["split"]["scaled_dot_product_attention"] == wanted
    assert all(record["train/loss"] < 6.5 for record in search.records)
