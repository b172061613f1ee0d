"""Process groups of a plan: one device mesh for every way in which its layers divide a stage.

Ranks of a stage follow each other; in a stage tensor-parallel ranks do (Megatron-LM's order, which the
cost model prices). Layers of different tensor-parallel degree have a mesh each over the same ranks.
"""

from itertools import pairwise
from math import lcm

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from darts_parallel.plan.strategy import LayerStrategy, Plan


def shard_ranks(strategy: LayerStrategy) -> int:
    """Data-parallel ranks over which the layer's ZeRO stage shards."""
    return (strategy.zero_stage and strategy.shard_size) or strategy.dp


class Meshes:
    """All groups of a plan on this rank; making them is collective, in one order on every rank.

    Args:
        plan: The plan.
        device: `cpu` or `cuda`.
        experts: Whether layers have experts, whose groups fold over the same ranks.
    """

    def __init__(self, plan: Plan, device: str, experts: bool = False) -> None:
        self.rank, self.pp = dist.get_rank(), plan.pp
        self.stage_size = dist.get_world_size() // plan.pp
        self.stage, self.position = divmod(self.rank, self.stage_size)
        self._device = device
        self._by_division: dict[tuple[int, int], DeviceMesh] = {}
        for tp, shards in sorted({(layer.tp, shard_ranks(layer)) for layer in plan.layers}):
            self._by_division[tp, shards] = self._divided(tp, shards)
        self._by_experts: dict[tuple[int, int], DeviceMesh] = {}
        for ep, etp in sorted({(layer.ep, layer.etp) for layer in plan.layers if experts}):
            self._by_experts[ep, etp] = self._folded(ep, etp)
        self._peers: dict[tuple[int, int], dist.ProcessGroup] = {}
        for before, after in pairwise(plan.layers):
            common = lcm(before.tp, after.tp)
            for tp in sorted({before.tp, after.tp} - {common}):
                if (tp, common) not in self._peers:
                    self._peers[tp, common] = self._peer_group(tp, common)
        # down and up a V, the head lies beside the embedding
        self.tied = self._tied_group() if plan.chunk_devices[-1] > 0 else None

    def of(self, strategy: LayerStrategy) -> DeviceMesh:
        """The mesh that a layer lies on: `pp`, `replicate`, `shard`, `tp`."""
        return self._by_division[strategy.tp, shard_ranks(strategy)]

    def of_experts(self, strategy: LayerStrategy) -> DeviceMesh:
        """The mesh that a layer's experts lie on: `pp`, `replicate`, `shard` (edp), `ep`, `tp` (etp)."""
        return self._by_experts[strategy.ep, strategy.etp]

    def tensor_group(self, tp: int) -> dist.ProcessGroup:
        """Ranks that share a layer of this degree and read the same tokens."""
        mesh = next(mesh for (degree, _), mesh in self._by_division.items() if degree == tp)
        return mesh["tp"].get_group()

    def peers(self, tp: int, common: int) -> dist.ProcessGroup:
        """Ranks of a `common` group that hold the same part of a layer of degree `tp`, in batch order."""
        return self._peers[tp, common]

    @property
    def pipeline(self) -> dist.ProcessGroup:
        """Ranks of the same place in every stage."""
        return next(iter(self._by_division.values()))["pp"].get_group()

    def _divided(self, tp: int, shards: int) -> DeviceMesh:
        shape = (self.pp, self.stage_size // tp // shards, shards, tp)
        return init_device_mesh(self._device, shape, mesh_dim_names=("pp", "replicate", "shard", "tp"))

    def _folded(self, ep: int, etp: int) -> DeviceMesh:
        shape = (self.pp, 1, self.stage_size // (ep * etp), ep, etp)
        return init_device_mesh(self._device, shape, mesh_dim_names=("pp", "replicate", "shard", "ep", "tp"))

    def _peer_group(self, tp: int, common: int) -> dist.ProcessGroup:
        shape = (self.pp, self.stage_size // common, common // tp, tp)
        mesh = init_device_mesh(self._device, shape, mesh_dim_names=("pp", "outer", "peer", "inner"))
        return mesh["peer"].get_group()

    def _tied_group(self) -> dist.ProcessGroup | None:
        """This rank's partner and itself, where it lies in the first or the last stage."""
        last = (self.pp - 1) * self.stage_size
        mine = None
        for place in range(self.stage_size):
            group = dist.new_group([place, last + place])
            if self.rank in (place, last + place):
                mine = group
        return mine
