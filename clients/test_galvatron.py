import os

import golden
import pytest

from darts_parallel.errors import Entries
from darts_parallel.export import Request

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
for path, layers, world, experts in json.load(sys.stdin):
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    args = GalvatronRuntimeArgs()
    args.local_rank, args.model.num_layers, args.model.is_moe_model = 1, layers, experts
    args.parallel.galvatron_config_path = path
    try:
        print("READ", json.dumps(get_hybrid_parallel_configs_api(args)))
    except Exception as error:
        print("READ", json.dumps({"error": f"{type(error).__name__}: {error}"}))
    dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def read() -> Entries:
    """Return what the runtime reads of every plan."""
    if GALVATRON is None:
        pytest.skip("GALVATRON=FOLDER names a checkout of Hetu-Galvatron")
    rows = []
    names = golden.cases("galvatron")
    for name in names:
        problem = golden.built(name)[0]
        file = str(golden.path(name, "galvatron.json"))
        blocks = problem.config.model.num_layers
        world = problem.cluster.num_devices
        rows.append([file, blocks, world, problem.model.has_experts])
    return dict(zip(names, golden.answers(["-c", READ], rows, GALVATRON), strict=True))


@pytest.mark.parametrize("name", golden.cases("galvatron"))
def test_the_runtime_reads_the_plan(name: str, read: Entries) -> None:
    problem, plan = golden.built(name)
    found = read[name]
    job = Request("galvatron", problem, plan)
    blocks = job.blocks
    assert found.get("error") is None
    assert found["pp_deg"] == plan.pp
    assert found["tp_sizes_enc"] == [own.tp for own in blocks]
    assert found["cp_sizes_enc"] == [plan.cp] * len(blocks)
    assert found["ep_sizes_enc"] == [own.ep for own in blocks]
    assert found["tp_of_ep_sizes_enc"] == [own.etp for own in blocks]
    assert found["dp_types_enc"] == [int(own.zero_stage == 3) for own in blocks]
    assert found["checkpoint_flags_enc"] == [int(own.recompute == "full") for own in blocks]
    assert found["pp_division"] == [chunk.num_blocks for chunk in job.chunks]
