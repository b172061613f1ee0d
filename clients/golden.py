"""The exports that the programs read: golden ones of `tests/golden/export`, and plans drawn at random."""

import json
import os
import random
import subprocess
import sys
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from darts_parallel import ConfigError, UnsupportedError
from darts_parallel.export import export_plan, require_trainers, write_export
from darts_parallel.plans import Plan
from darts_parallel.problem import Problem, load_problem
from tests.export.test_trainers import random_plans
from tests.support.export_plans import CASES, GOLDEN, NAMES

MODELS = (
    "gpt2_xl",
    "llama3_8b",
    "llama2_70b",
    "mixtral_8x7b",
    "qwen3_30b_a3b",
    "deepseek_v3",
    "kimi_k2",
    "nemotron_h_8b",
    "nemotron3_nano_30b_a3b",
    "gpt_oss_20b",
    "bloom_176b",
    "toy",
    "toy_moe",
)
DRAWN = int(os.environ.get("DRAWN") or len(MODELS))
SEED = os.environ.get("SEED") or "0"
"""Random plans of every trainer, a model each where it takes the model."""
CLUSTERS = ("h100_1x8", "h100_8x8", "a100_40_2x8", "a10_4x4")
SPACE = ("space.cp=null", "space.virtual_stages=null", "space.num_micro_batches=[4,8,16]")
FOLDER = Path(tempfile.mkdtemp(prefix="darts-parallel-clients-"))


def cases(target: str) -> list[str]:
    """Names of the golden plans that a target can express, and of random ones."""
    written = [name for name, other in NAMES if other == target]
    return written + [f"{target}-{SEED}-{number}" for number in range(DRAWN)]


def path(name: str, file: str) -> Path:
    """Path of one file."""
    built(name)
    return (GOLDEN if name in CASES else FOLDER) / name / file


def read(name: str, file: str) -> str:
    """Text of one file."""
    return path(name, file).read_text(encoding="utf-8")


def answers(
    words: list[str],
    rows: Any,
    checkout: str,
) -> list[Any]:
    """Return what a program on a checkout reads of every row."""
    env = {**os.environ, "PYTHONPATH": checkout}
    run = [sys.executable, *words]
    done = subprocess.run(run, input=json.dumps(rows), env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("READ ")]


@cache
def built(name: str) -> tuple[Problem, Plan]:
    """Problem and plan of an export; a random one is written."""
    if name in CASES:
        return CASES[name].build()
    rng = random.Random(name)
    (target, _, number) = name.split("-")
    model = MODELS[int(number) % len(MODELS)]
    while True:
        cluster = rng.choice(CLUSTERS)
        job = [f"model={model}", f"training={model}", f"trainer={target}", f"cluster={cluster}"]
        job += SPACE
        if target == "megatron" and int(number) % 2:
            job.append("model.mtp_num_layers=1")
        with suppress(ConfigError, UnsupportedError):
            problem = load_problem([*job, "training.global_batch_size=256"])
            require_trainers(problem)
            (plan,) = random_plans(problem, rng, 1)
            (FOLDER / name).mkdir(exist_ok=True)
            write_export(export_plan(problem, plan, target), FOLDER / name)
            return problem, plan
        model = rng.choice(MODELS)  # the target lacks that one, or the plan
