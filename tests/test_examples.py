"""The examples do what they say."""

import json
from pathlib import Path
from typing import Any

import pytest

from darts_parallel.planner import plan
from darts_parallel.problem.problem import load_problem
from tests.support.sources import ROOT

EXAMPLES = ROOT / "examples"


def test_the_notebook_runs_from_top_to_bottom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    cells = json.loads((EXAMPLES / "first_plan.ipynb").read_text(encoding="utf-8"))["cells"]
    assert len(cells) == 10
    names: dict[str, Any] = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    printed = capsys.readouterr().out
    assert "bert_345m" in printed
    assert "'plan.json'" in printed
    assert (tmp_path / "notebook_run" / "plan.json").exists()


def test_the_cluster_of_the_example_plans_a_job() -> None:
    job = ["model=bert_345m", "training=bert_345m", "cluster=my_cluster", "search=exact"]
    problem = load_problem([*job, "space=uniform"], config_dir=str(EXAMPLES / "own_cluster"))
    assert problem.cluster.num_devices == 32
    assert plan(problem).result is not None


def test_the_module_of_the_example_is_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from darts_parallel.graph import main

    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.chdir(tmp_path)
    inputs = "inputs=[[2,64,1024]]"
    main(["module=own_module:make_block", inputs, "cluster=h100_1x8", "verify=false"])
    assert "tp" in capsys.readouterr().out
