"""Searched orders of passes run in torchtitan's own schedule class, on processes, as one process does."""

import copy
import runpy
import subprocess
import sys
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn

pipelines = pytest.importorskip("torchtitan.distributed.pipeline_parallel")


def loss(out: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, None]:
    """Return the mean square as torchtitan's losses do, with no further figures."""
    return (out - target).square().mean(), None


def pipeline_settings(folder: str, layers: int) -> Any:
    """Return the plan's settings of torchtitan's debug model with more layers."""
    from torchtitan.models.llama3 import config_registry

    config = config_registry.llama3_debugmodel()
    scope = runpy.run_path(f"{folder}/torchtitan_plan.py")
    model = config.model_spec.model
    deeper = replace(model, layers=(list(model.layers) * layers)[:layers])
    config.model_spec = replace(config.model_spec, model=deeper)
    return scope["apply_plan"](config).parallelism


def rank_grads(
    rank: int,
    world: int,
    folder: str,
    layers: int,
    count: int,
) -> None:
    """Take one step as a rank of the plan's pipeline, and compare its gradients with those of one process."""
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=world)
    settings = pipeline_settings(folder, layers)
    total = len(settings.module_fqns_per_model_part)
    mine = (rank,) if total == world else (rank, total - 1 - rank)
    torch.manual_seed(1)
    stages = nn.ModuleList()
    for _ in range(total):
        stages.append(nn.Sequential(nn.Linear(8, 8), nn.Tanh()).double())
    alone = copy.deepcopy(stages)
    main = "num_microbatches" in signature(pipelines._build_pipeline_schedule).parameters
    cpu = torch.device("cpu")
    parts = [pipelines.PipelineStage(stages[k], k, total, cpu) for k in mine]
    batch = "num_microbatches" if main else "local_batch_size"
    given = {"parallelism": settings, "stages": parts, "loss_fn": loss, batch: count}
    schedule = pipelines._build_pipeline_schedule(**given)
    assert type(schedule).__name__ == "_PipelineScheduleRuntime"
    inputs, targets = torch.randn(2, count, 8, dtype=torch.float64)
    first = (inputs,) if 0 in mine else ()
    last = {"target": targets} if total - 1 in mine else {}
    schedule.step(*first, **last)
    model = nn.Sequential(*alone)
    for one, target in zip(inputs.chunk(count), targets.chunk(count), strict=True):
        error, _ = loss(model(one), target)
        torch.autograd.backward(error)
    for k in mine:
        for found, known in zip(stages[k].parameters(), alone[k].parameters(), strict=True):
            torch.testing.assert_close(found.grad, known.grad, rtol=0, atol=1e-15)
    dist.barrier()


@pytest.mark.parametrize(("layers", "pp", "count"), [(22, 4, 8), (43, 8, 16), (30, 8, 8)])
def test_an_order_runs_as_one_process_does(
    layers: int,
    pp: int,
    count: int,
    tmp_path: Path,
) -> None:
    job = [
        "model=llama3_8b",
        "training=llama3_8b",
        "cluster=h100_1x8",
        "trainer=torchtitan",
        f"model.num_layers={layers}",
        f"space.pp={pp}",
        f"cluster.nodes.0.gpus={pp}",
        f"hydra.run.dir={tmp_path}",
        f"training.global_batch_size={count}",
        f"space.num_micro_batches={count}",
        "space.tp=1",
        "space.out_of_memory=0.5",
        "space.schedules=[1f1b,zero_bubble_v,searched]",
    ]
    subprocess.run([sys.executable, "-m", "darts_parallel", *job], check=True)
    spawn(rank_grads, (pp, str(tmp_path), layers, count), nprocs=pp)  # type: ignore[no-untyped-call]
