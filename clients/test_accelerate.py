import runpy
from types import SimpleNamespace
from typing import Any

import golden
import pytest
import yaml

commands = pytest.importorskip("accelerate.commands.config.config_args")


@pytest.mark.parametrize("name", golden.cases("accelerate"))
def test_accelerate_launch_reads_the_file(name: str) -> None:
    problem, _ = golden.built(name)
    config = commands.load_config_from_file(str(golden.path(name, "accelerate.yaml")))
    assert config.num_processes == problem.cluster.num_devices


@pytest.mark.parametrize("name", golden.cases("accelerate"))
def test_the_parallelism_is_one_that_accelerate_accepts(name: str) -> None:
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.utils import DistributedType

    values: dict[str, Any] = yaml.safe_load(golden.read(name, "accelerate.yaml"))
    sizes = values.get("parallelism_config")
    if sizes is None:
        assert values["distributed_type"] == "MULTI_GPU"
        return
    fields = {key.removeprefix("parallelism_config_"): size for key, size in sizes.items()}
    fsdp = values["distributed_type"] == "FSDP"
    accelerator = SimpleNamespace(
        num_processes=values["num_processes"],
        is_fsdp2=fsdp,
        multi_device=not fsdp,
        distributed_type=DistributedType[values["distributed_type"]],
    )
    ParallelismConfig(**fields)._validate_accelerator(accelerator)


@pytest.mark.parametrize("name", golden.cases("accelerate"))
def test_the_snippet_names_only_what_accelerate_has(name: str) -> None:
    scope = runpy.run_path(str(golden.path(name, "accelerate_plan.py")))
    assert callable(scope["planned_accelerator"])
