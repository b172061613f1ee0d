import json
import runpy
from contextlib import nullcontext
from itertools import product
from typing import Any

import golden
import pytest

from darts_parallel.export import refusals
from darts_parallel.plans import LayerStrategy
from tests.support.export_plans import MIXTURE, plan_of, problem_of

config = pytest.importorskip("deepspeed.runtime.config")


@pytest.mark.parametrize("name", golden.cases("deepspeed"))
def test_deepspeed_accepts_the_file_in_the_whole_world(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem, plan = golden.built(name)
    # DeepSpeed checks the batch against what is left of the processes without those of a pipeline
    world = problem.cluster.num_devices // plan.pp
    monkeypatch.setattr("deepspeed.comm.get_world_size", lambda group=None: world)
    monkeypatch.setattr("deepspeed.comm.get_rank", lambda group=None: 0)
    values = json.loads(golden.read(name, "deepspeed.json"))
    read = config.DeepSpeedConfig(values)
    if problem.model.has_experts:
        experts = read.expert_parallel_config
        assert experts.enabled
        assert experts.autoep_size == plan.layers[1].ep
        _check_experts(experts, world, plan.layers[1])
    assert read.gradient_accumulation_steps == plan.num_micro_batches
    assert read.zero_optimization_stage == plan.layers[0].zero_stage
    assert read.train_micro_batch_size_per_gpu == values["train_micro_batch_size_per_gpu"]


def _check_experts(
    given: Any,
    world: int,
    strategy: LayerStrategy,
) -> None:
    """Run what the engine asks of AutoEP before it makes any process group."""
    from deepspeed.module_inject.auto_ep_config import validate_autoep_config
    from deepspeed.module_inject.auto_ep_folding import build_folding_spec, validate_folding_global

    validate_autoep_config(given, world, 1, strategy.tp, 1)
    sizes = {"world_size": world, "pp_size": 1, "tp_size": strategy.tp}
    spec = build_folding_spec(**sizes, ep_size=given.autoep_size)
    validate_folding_global(spec, zero_stage=strategy.zero_stage)


@pytest.mark.parametrize(("tp", "zero", "ep"), product((1, 2), range(4), (1, 2, 4)))
def test_autoep_takes_the_degrees_that_the_export_takes(
    tp: int,
    zero: int,
    ep: int,
) -> None:
    from deepspeed.module_inject.auto_ep_config import AutoEPConfig

    problem = problem_of(tuple(MIXTURE))
    strategy = LayerStrategy(tp, 8 // tp, zero, ep=ep)
    given = AutoEPConfig(enabled=True, autoep_size=ep)
    why = refusals(problem, plan_of(problem, strategy, 2), "deepspeed")
    assert bool(why) == (tp > 1)  # it restores rows that have no price here
    with pytest.raises(ValueError, match="AutoEP") if tp > ep == 1 else nullcontext():
        _check_experts(given, 8, strategy)


PIPELINES = [name for name in golden.cases("deepspeed") if golden.built(name)[1].pp > 1]


@pytest.mark.parametrize("name", PIPELINES)
def test_the_pipeline_overrides_what_deepspeed_has(name: str) -> None:
    from deepspeed.pipe import PipelineModule

    scope = runpy.run_path(str(golden.path(name, "deepspeed_pipeline.py")))
    assert issubclass(scope["PlannedPipeline"], PipelineModule)
    assert all(hasattr(PipelineModule, name) for name in ("_partition_layers", "_set_bounds"))
