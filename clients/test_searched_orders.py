"""Searched orders of passes run in torchtitan's own schedule class, on processes, as one process does."""

import copy
import runpy
import subprocess
import sys
from dataclasses import replace
from inspect import signature
from pathlib import Path

import pytest
import torch
from torch import distributed as dist
from torch import nn

pipelines = pytest.importorskip("torchtitan.distributed.pipeline_parallel")


def rank_grads(rank: int, world: int, folder: str, layers: int, count: int) -> None:
    """Take one step as a rank of the plan's pipeline, and compare its gradients with those of one process."""
    from torchtitan.models.llama3 import config_registry

    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=world)
    config, scope = (
        config_registry.llama3_debugmodel(),
        runpy.run_path(f"{folder}/torchtitan_plan.py"),
    )
    model = config.model_spec.model
    deeper = replace(model, layers=(list(model.layers) * layers)[:layers])
    config.model_spec = replace(config.model_spec, model=deeper)
    settings = scope["apply_plan"](config).parallelism
    total = len(settings.module_fqns_per_model_part)
    mine = (rank,) if total == world else (rank, total - 1 - rank)
    torch.manual_seed(1)
    stages = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()).double() for _ in range(total))
    alone = copy.deepcopy(stages)
    main = "num_microbatches" in signature(pipelines._build_pipeline_schedule).parameters
    schedule = pipelines._build_pipeline_schedule(
        parallelism=settings,
        loss_fn=lambda out, target: ((out - target).square().mean(), None),
        stages=[pipelines.PipelineStage(stages[k], k, total, torch.device("cpu")) for k in mine],
        **({"num_microbatches": count} if main else {"local_batch_size": count}),
    )
    assert type(schedule).__name__ == "_PipelineScheduleRuntime"
    inputs, targets = torch.randn(2, count, 8, dtype=torch.float64)
    schedule.step(*[inputs] * (0 in mine), **({"target": targets} if total - 1 in mine else {}))
    for one, target in zip(inputs.chunk(count), targets.chunk(count), strict=True):
        (nn.Sequential(*alone)(one) - target).square().mean().backward()
    for k in mine:
        for found, known in zip(stages[k].parameters(), alone[k].parameters(), strict=True):
            torch.testing.assert_close(found.grad, known.grad, rtol=0, atol=1e-15)
    dist.barrier()


@pytest.mark.parametrize(("layers", "pp", "count"), [(22, 4, 8), (43, 8, 16), (30, 8, 8)])
def test_an_order_runs_as_one_process_does(
    layers: int, pp: int, count: int, tmp_path: Path
) -> None:
    job = [
        "model=llama3_8b",
        f"model.num_layers={layers}",
        "training=llama3_8b",
        "cluster=h100_1x8",
    ]
    job += [
        "trainer=torchtitan",
        f"space.pp={pp}",
        f"cluster.nodes.0.gpus={pp}",
        f"hydra.run.dir={tmp_path}",
    ]
    job += [f"training.global_batch_size={count}", f"space.num_micro_batches={count}", "space.tp=1"]
    job += ["space.schedules=[1f1b,zero_bubble_v,searched]", "space.out_of_memory=0.5"]
    subprocess.run([sys.executable, "-m", "darts_parallel", *job], check=True)
    torch.multiprocessing.spawn(rank_grads, (pp, str(tmp_path), layers, count), nprocs=pp)
