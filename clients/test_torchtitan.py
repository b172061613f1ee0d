import runpy
from dataclasses import replace
from math import prod
from typing import Any

import golden
import pytest
import torch
from torch import distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from darts_parallel.export import Request

distributed = pytest.importorskip("torchtitan.distributed")
registry = pytest.importorskip("torchtitan.models.llama3.config_registry")


def configured(name: str) -> Any:
    """The trainer's configuration with a plan, on one of its own models of the plan's depth."""
    problem, _ = golden.built(name)
    scope = runpy.run_path(str(golden.path(name, "torchtitan_plan.py")))
    if problem.model.has_experts:
        from torchtitan.models.qwen3 import config_registry, model_registry

        config = config_registry.qwen3_debugmodel()
        config.model_spec = model_registry("debugmodel_moe")
    else:
        config = registry.llama3_debugmodel()
    model = config.model_spec.model
    layers = problem.config.model.num_layers
    if len(model.layers) != layers:
        with pytest.raises(ValueError, match="but the plan has"):
            scope["apply_plan"](config)
    deeper = replace(model, layers=(list(model.layers) * layers)[:layers])
    config.model_spec = replace(config.model_spec, model=deeper)
    return scope["apply_plan"](config)


@pytest.mark.parametrize("name", golden.cases("torchtitan"))
def test_the_trainer_takes_the_plan(name: str) -> None:
    problem, plan = golden.built(name)
    made = configured(name)
    sequences = problem.training.global_batch_size
    length = problem.training.seq_len
    if hasattr(made.training, "num_tokens_per_train_step"):
        assert made.training.num_tokens_per_train_step == sequences * length
    else:
        assert (made.training.global_batch_size, made.training.seq_len) == (sequences, length)
    assert made.parallelism.pipeline_parallel_degree == plan.pp
    assert made.parallelism.expert_parallel_degree == plan.layers[1].ep
    # what the program checks before it starts
    made.parallelism.__post_init__()
    made.__post_init__()
    distributed.ParallelDims.from_config(made.parallelism, problem.cluster.num_devices)


def parts(config: Any, world: int) -> list[Any]:
    """Build what a rank holds on the meta device: the chunks of its stage, or the whole model."""
    config.parallelism.spmd_backend = "partial_dtensor"  # the other one wants a nightly torch
    distributed.utils.set_spmd_backend(config.parallelism.spmd_backend)
    spec = config.model_spec
    meshes = distributed.ParallelDims.from_config(config.parallelism, world)
    meshes.build_mesh()
    spec.model.update_from_config(config=config)
    with torch.device("meta"):
        model = spec.model.build()
    given = {
        "parallel_dims": meshes,
        "training": config.training,
        "parallelism": config.parallelism,
        "compile_config": config.compile,
        "dump_folder": "",
        "ac_config": config.activation_checkpoint,
    }
    if config.parallelism.pipeline_parallel_degree == 1:
        return [spec.parallelize_fn(model, **given)]
    given |= {"device": torch.device("cpu"), "model_config": spec.model, "loss_fn": loss}
    _, chunks, *_ = spec.pipelining_fn(model, **given, parallelize_fn=spec.parallelize_fn)
    return chunks


def loss(logits: Any, labels: Any) -> Any:
    """Return any scalar: nothing is trained."""
    return logits.sum()


def degree(parameter: Any) -> int:
    """Return the ranks that share a parameter."""
    pairs = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
    return prod(size for size, placement in pairs if placement.is_shard())


@pytest.mark.parametrize(
    "name", [n for n in golden.cases("torchtitan") if golden.built(n)[1].cp == 1]
)
def test_its_model_has_the_stages_and_shards_of_the_plan(name: str) -> None:
    """Its context parallelism wants CUDA."""
    problem, plan = golden.built(name)
    job = Request("torchtitan", problem, plan)
    world = problem.cluster.num_devices
    strategy = plan.layers[1]
    found = []
    for stage in range(plan.pp):
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group(
            "fake", store=FakeStore(), rank=stage * world // plan.pp, world_size=world
        )
        for part in parts(configured(name), world):
            blocks = sorted(int(key) for key in part.layers)
            embedding = part.tok_embeddings is not None
            head = part.lm_head is not None
            shards = {degree(p) for n, p in part.named_parameters() if "wo.weight" in n}
            found.append((embedding, blocks[:1], len(blocks), head, shards))
    pieces = strategy.tp * job.sharded_over(strategy)
    expected = []
    for chunk in job.chunks:
        first = [chunk.first_block] if chunk.num_blocks else []
        shards = {pieces} if chunk.num_blocks else set()
        expected.append((chunk.embedding, first, chunk.num_blocks, chunk.head, shards))
    assert sorted(found, key=str) == sorted(expected, key=str)
