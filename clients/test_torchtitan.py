import runpy
from dataclasses import replace

import golden
import pytest

registry = pytest.importorskip("torchtitan.models.llama3.config_registry")


@pytest.mark.parametrize("name", golden.cases("torchtitan"))
def test_the_release_takes_the_plan(name: str) -> None:
    problem, plan = golden.built(name)
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
    made = scope["apply_plan"](config)
    length = getattr(made.training, "seq_len", None) or made.training.max_context_length  # 0.3.0, main
    assert length == problem.training.seq_len
    assert made.parallelism.pipeline_parallel_degree == plan.pp
    assert made.parallelism.expert_parallel_degree == plan.layers[1].ep
    # what the program checks before it starts
    made.parallelism.__post_init__()
    made.__post_init__()
    distributed = pytest.importorskip("torchtitan.distributed")
    distributed.ParallelDims.from_config(made.parallelism, problem.cluster.num_devices)
