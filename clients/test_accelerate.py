import runpy

import golden
import pytest

commands = pytest.importorskip("accelerate.commands.config.config_args")


@pytest.mark.parametrize("name", golden.cases("accelerate"))
def test_accelerate_launch_reads_the_file(name: str) -> None:
    problem, _ = golden.built(name)
    config = commands.load_config_from_file(str(golden.path(name, "accelerate.yaml")))
    assert config.num_processes == problem.cluster.num_devices


@pytest.mark.parametrize("name", golden.cases("accelerate"))
def test_the_snippet_names_only_what_accelerate_has(name: str) -> None:
    scope = runpy.run_path(str(golden.path(name, "accelerate_plan.py")))
    assert callable(scope["planned_accelerator"])
