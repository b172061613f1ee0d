import ast
import re
from pathlib import Path

import pytest

from darts_parallel.export import export_plan
from darts_parallel.plan.strategy import LayerStrategy
from tests.support.export_plans import LLAMA, TOY, plan_of, problem_of
from tests.support.processes import run_program, run_ranks

SMALL = ("training.precision=fp32", "training.global_batch_size=8", "cluster=toy_1x2")


def program(model: list[str], strategy: LayerStrategy, cuts: tuple[int, ...] = (), **more: int) -> str:
    problem = problem_of((*model, *SMALL))
    return export_plan(problem, plan_of(problem, strategy, 2, cuts, **more), "torch").files["train_torch.py"]


def test_the_program_holds_the_plan_and_needs_nothing_but_torch() -> None:
    text = program(TOY, LayerStrategy(1, 2, 1, "full"), (2,))
    tree = ast.parse(text)
    imported = {
        (node.module if isinstance(node, ast.ImportFrom) else node.names[0].name).split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    assert imported == {"argparse", "os", "typing", "torch"}
    (plan,) = (node.value for node in tree.body if isinstance(node, ast.AnnAssign))
    assert plan is not None
    values = ast.literal_eval(plan)
    # embedding, 4 blocks, head: the loss is none of its layers
    assert (values["pp"], values["parts"], values["recomputed"]) == (2, [[0, 2], [2, 6]], [1, 2, 3, 4])
    assert values["model"]["tie_embeddings"]


def losses(text: str, folder: Path, processes: int) -> list[float]:
    """Return what the program prints, on the CPU and in the environment that torchrun gives it."""
    file = folder / f"train_{processes}.py"
    file.write_text(text)
    printed = "".join(run_ranks(processes, folder, run_program, file, "--steps", "2"))
    return [float(x) for x in re.findall(r"^step \d+ loss ([\d.]+)$", printed, re.MULTILINE)]


def test_the_program_trains_alike_in_one_process_and_in_a_pipeline(tmp_path: Path) -> None:
    model = [*LLAMA, "model.num_layers=3", "model.tie_embeddings=true"]
    alone = losses(program(model, LayerStrategy(1, 1)), tmp_path, 1)
    parallel = losses(program(model, LayerStrategy(1, 1, 0, "full"), (3,)), tmp_path, 2)
    assert len(alone) == 2
    assert parallel == pytest.approx(alone, abs=2e-5)
