import ast
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from darts_parallel.export import export_plan
from darts_parallel.strategy import LayerStrategy
from tests.export_plans import LLAMA, TOY, plan_of, problem_of

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
    """What the program prints, on the CPU; by torchrun where it takes several processes."""
    file = folder / f"train_{processes}.py"
    file.write_text(text)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--master-port", port]
    if processes == 1:
        launcher = []
        environment |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    command = [sys.executable, *launcher, str(file), "--steps", "2"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    return [float(x) for x in re.findall(r"^step \d+ loss ([\d.]+)$", run.stdout, re.MULTILINE)]


@pytest.mark.slow
def test_the_program_trains_alike_in_one_process_and_in_a_pipeline(tmp_path: Path) -> None:
    model = [*LLAMA, "model.num_layers=3", "model.tie_embeddings=true"]
    alone = losses(program(model, LayerStrategy(1, 1)), tmp_path, 1)
    parallel = losses(program(model, LayerStrategy(1, 1, 0, "full"), (3,)), tmp_path, 2)
    assert len(alone) == 2
    assert parallel == pytest.approx(alone, abs=2e-5)
