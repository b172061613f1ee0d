"""The program for PyTorch: what it writes is started by processes with torchrun's environment, and trains."""

import re
import runpy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from darts_parallel.export import export_plan
from darts_parallel.plans.strategy import LayerStrategy as Strategy
from darts_parallel.plans.strategy import Plan
from darts_parallel.problem.problem import Problem
from darts_parallel.run._verify import Reference
from tests.support.processes import run_program, run_ranks
from tests.support.running import LLAMA, MIXTURE, tiny, uniform

SEQUENCE = Strategy(2, 1, 0, "selective", True)
ONE_STAGE = Plan(
    2, (0, 5), (Strategy(1, 2, 3), SEQUENCE, Strategy(1, 2, 2, "full"), *(Strategy(2, 1),) * 2)
)
SECOND = (Strategy(1, 2, 1), *(replace(SEQUENCE, recompute="none"),) * 2)
STAGES = Plan(2, (0, 2, 5), (Strategy(2, 1), Strategy(1, 2, 2, "full"), *SECOND))
"""Unequal stages of two devices each, whose layers differ in tp, ZeRO and recomputation."""


def written(problem: Problem, plan: Plan, folder: Path) -> Path:
    """Write the program and its plan; return the program's path."""
    for name, text in export_plan(problem, plan, "torch").files.items():
        (folder / name).write_text(text)
    return folder / "train_torch.py"


def losses(problem: Problem, plan: Plan, folder: Path) -> list[float]:
    """Return what the program prints, on the CPU and in the environment that torchrun gives it."""
    program = written(problem, plan, folder)
    said = "".join(
        run_ranks(problem.cluster.num_devices, folder, run_program, program, "--steps", "2")
    )
    return [float(x) for x in re.findall(r"^step \d+ loss ([\d.]+)$", said, re.MULTILINE)]


HALF = "training.precision=bf16"
V_SHAPED = uniform((0, 1, 2, 3, 5), 4, Strategy(1, 1), chunks=2, schedule="zero_bubble_v")
EXPERTS = Plan(
    2, (0, 5), (Strategy(1, 2, 1), replace(SEQUENCE, etp=2), *(Strategy(1, 2, 2, ep=2),) * 3)
)


@pytest.mark.parametrize(
    ("devices", "plan", "overrides", "error"),
    [
        pytest.param(4, STAGES, (), 2e-6, marks=pytest.mark.slow),
        (2, ONE_STAGE, LLAMA, 2e-6),
        (2, V_SHAPED, (*LLAMA, HALF), 2e-3),
        (2, EXPERTS, (*MIXTURE, HALF), 2e-3),
    ],
)
def test_a_layer_wise_plan_trains_as_one_process_does(
    devices: int, plan: Plan, overrides: tuple[str, ...], error: float, tmp_path: Path
) -> None:
    problem = tiny(devices, *overrides)
    found = losses(problem, plan, tmp_path)
    batch = runpy.run_path(str(tmp_path / "train_torch.py"))["batch"]
    alone = Reference.build(problem, 0, torch.device("cpu"))
    wanted = []
    for step in range(2):
        wanted.append(alone.forward_backward(batch(step), plan.num_micro_batches))
        alone.update()
    assert found == pytest.approx(wanted, rel=error)
    assert (HALF in overrides) == (found != pytest.approx(wanted, rel=2e-6))
