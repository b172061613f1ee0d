"""The exports that the programs read: golden ones of `tests/golden/export`, and plans drawn at random."""

import random
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

from darts_parallel import ConfigError, UnsupportedError
from darts_parallel.export import export_plan, require_trainers, write_export
from darts_parallel.plan import Plan
from darts_parallel.problem import Problem, load_problem
from tests.export.test_trainers import random_plans
from tests.support.export_plans import CASES, GOLDEN, NAMES

DRAWN = 12  # random plans of every trainer
MODELS = ("gpt2_xl", "llama3_8b", "llama2_70b", "mixtral_8x7b", "qwen3_30b_a3b", "deepseek_v3", "kimi_k2",
          "nemotron_h_8b", "toy", "toy_moe")  # fmt: skip
CLUSTERS = ("h100_1x8", "h100_8x8", "a100_40_2x8", "a10_4x4")
SPACE = ("space.cp=null", "space.virtual_stages=null", "space.num_micro_batches=[4,8,16]")
FOLDER = Path(tempfile.mkdtemp(prefix="darts-parallel-clients-"))


def cases(target: str) -> list[str]:
    """Names of the golden plans that a target can express, and of random ones."""
    return [name for name, other in NAMES if other == target] + [f"{target}-{n}" for n in range(DRAWN)]


def path(name: str, file: str) -> Path:
    """Path of one file."""
    built(name)
    return (GOLDEN if name in CASES else FOLDER) / name / file


def read(name: str, file: str) -> str:
    """Text of one file."""
    return path(name, file).read_text(encoding="utf-8")


@cache
def built(name: str) -> tuple[Problem, Plan]:
    """Problem and plan of an export; a random one is written."""
    if name in CASES:
        return CASES[name].build()
    rng, target = random.Random(name), name.partition("-")[0]
    while True:
        model, cluster = rng.choice(MODELS), rng.choice(CLUSTERS)
        job = [f"model={model}", f"cluster={cluster}", f"training={model}", f"trainer={target}", *SPACE]
        with suppress(ConfigError, UnsupportedError):
            problem = load_problem([*job, "training.global_batch_size=256"])
            require_trainers(problem)
            (plan,) = random_plans(problem, rng, 1)
            (FOLDER / name).mkdir(exist_ok=True)
            write_export(export_plan(problem, plan, target), FOLDER / name)
            return problem, plan
