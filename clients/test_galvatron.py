import json
import os
import subprocess
import sys

import golden
import pytest

GALVATRON = os.environ.get("GALVATRON") or None
"""A folder of Hetu-Galvatron, which is on no package index."""
READ = """
import importlib.machinery, json, sys, types
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

KERNELS = ("flash_attn", "apex", "transformer_engine", "galvatron_dp_core", "grouped_gemm")

class Stub(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})

class Finder:  # kernels for GPUs, which are not here
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in KERNELS:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
    def create_module(self, spec):
        stub = Stub(spec.name)
        stub.__path__ = []
        return stub
    def exec_module(self, module):
        pass

sys.meta_path.insert(0, Finder())
from galvatron.core.runtime.args_schema import GalvatronRuntimeArgs
from galvatron.core.runtime.hybrid_parallel_config import get_hybrid_parallel_configs_api
path, layers, world, experts = json.load(sys.stdin)
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
args = GalvatronRuntimeArgs()
args.local_rank, args.model.num_layers, args.model.is_moe_model = 1, layers, experts
args.parallel.galvatron_config_path = path
print("READ", json.dumps(get_hybrid_parallel_configs_api(args)))
"""


@pytest.mark.parametrize("name", golden.cases("galvatron"))
def test_the_runtime_reads_the_plan(name: str) -> None:
    if GALVATRON is None:
        pytest.skip("GALVATRON=FOLDER names a checkout of Hetu-Galvatron")
    problem, plan = golden.built(name)
    blocks = problem.config.model.num_layers
    file = str(golden.path(name, "galvatron.json"))
    done = subprocess.run(
        [sys.executable, "-c", READ],
        input=json.dumps([file, blocks, problem.cluster.num_devices, problem.model.has_experts]),
        env={**os.environ, "PYTHONPATH": GALVATRON},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("READ "))
    read = json.loads(line.removeprefix("READ "))
    strategy = plan.layers[1]
    assert read["pp_deg"] == plan.pp
    assert read["tp_sizes_enc"] == [strategy.tp] * blocks
    assert read["ep_sizes_enc"] == [strategy.ep] * blocks
    assert read["tp_of_ep_sizes_enc"] == [strategy.etp] * blocks
    assert read["dp_types_enc"] == [int(strategy.zero_stage == 3)] * blocks
    assert read["checkpoint_flags_enc"] == [int(strategy.recompute == "full")] * blocks
    assert sum(read["pp_division"]) == blocks
