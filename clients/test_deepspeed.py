import json
import runpy

import golden
import pytest

config = pytest.importorskip("deepspeed.runtime.config")


@pytest.mark.parametrize("name", golden.cases("deepspeed"))
def test_deepspeed_accepts_the_file_in_the_whole_world(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem, plan = golden.built(name)
    # DeepSpeed checks the batch against what is left of the processes without those of a pipeline
    world = problem.cluster.num_devices // plan.pp
    monkeypatch.setattr("deepspeed.comm.get_world_size", lambda group=None: world)
    monkeypatch.setattr("deepspeed.comm.get_rank", lambda group=None: 0)
    values = json.loads(golden.read(name, "deepspeed.json"))
    read = config.DeepSpeedConfig(values)
    if problem.model.has_experts:
        assert read.expert_parallel_config.enabled
        assert read.expert_parallel_config.autoep_size == plan.layers[1].ep
    assert read.gradient_accumulation_steps == plan.num_micro_batches
    assert read.zero_optimization_stage == plan.layers[0].zero_stage
    assert read.train_micro_batch_size_per_gpu == values["train_micro_batch_size_per_gpu"]


@pytest.mark.parametrize("name", [n for n in golden.cases("deepspeed") if golden.built(n)[1].pp > 1])
def test_the_pipeline_overrides_what_deepspeed_has(name: str) -> None:
    from deepspeed.pipe import PipelineModule

    scope = runpy.run_path(str(golden.path(name, "deepspeed_pipeline.py")))
    assert issubclass(scope["PlannedPipeline"], PipelineModule)
    assert all(hasattr(PipelineModule, name) for name in ("_partition_layers", "_set_bounds"))
