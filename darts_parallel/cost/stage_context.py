"""The training job on one kind of stage: what every price of a layer is read from."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from darts_parallel.config import TrainingConfig
from darts_parallel.cost.choices import ChoiceTensors, element_bytes, float_tensor
from darts_parallel.cost.collectives import RingGroup, single_ring, split_group
from darts_parallel.cost.memory import StateBytes, state_bytes
from darts_parallel.plans import OuterSpace
from darts_parallel.problem import (
    Cluster,
    Device,
    LayerSpec,
    Link,
    MeasuredTimes,
    Model,
    NodeGroup,
    Problem,
    Software,
    StageTopology,
)


@dataclass(frozen=True)
class StageContext:
    """A training job, the devices and links of one kind of stage, and the strategies to price there."""

    model: Model
    cluster: Cluster
    training: TrainingConfig
    software: Software
    measured: MeasuredTimes | None
    """Layer times that take the place of the analytic ones (`cost=profiled`)."""
    lossy_block: int
    """Numbers that share a scale where they travel in few bits."""
    topology: StageTopology
    choices: ChoiceTensors

    @staticmethod
    def build(problem: Problem, topology: StageTopology, space: OuterSpace) -> "StageContext":
        """Read from a problem what prices the strategies of `space` on a stage of `topology`."""
        choices = ChoiceTensors.build(
            problem.training, space.num_micro_batches, space.choices, space.cp
        )
        return StageContext(
            problem.model,
            problem.cluster,
            problem.training,
            problem.software,
            problem.measured,
            problem.config.cost.lossy_block,
            topology,
            choices,
        )

    @cached_property
    def group(self) -> NodeGroup:
        """Node group that decides the stage's speed."""
        return self.cluster.groups[self.topology.group]

    @cached_property
    def device(self) -> Device:
        """Device of the stage."""
        return self.group.device

    @cached_property
    def links(self) -> tuple[Link, Link]:
        """Link inside a node, and the one between nodes, of the stage's collectives."""
        return self.cluster.stage_links(self.topology)

    @cached_property
    def shard_rings(self) -> tuple[RingGroup, RingGroup]:
        """Ranks that share the ZeRO state of a layer, and ranks that hold the same shard."""
        choices = self.choices
        return self.sharded(self.data_parallel(choices.tp), choices.ranks, choices.shards)

    def sharded(
        self, group: RingGroup, ranks: Tensor, shards: Tensor
    ) -> tuple[RingGroup, RingGroup]:
        """Divide data-parallel groups as `split_group` does, with the framework's rings of ZeRO-3."""
        inner, across = split_group(group, ranks, shards)
        if self.software.single_ring:
            inner = single_ring(inner, self.choices.zero_stage == 3)
        return inner, across

    @cached_property
    def tensor_ring(self) -> RingGroup:
        """Tensor-parallel groups of every strategy."""
        return self.tensor_parallel(self.choices.tp)

    def data_parallel(self, degrees: Tensor) -> RingGroup:
        """Return the data-parallel groups next to tensor-parallel ones of some degrees, `(C,)`."""
        return self._ring_group(degrees, self.topology.data_parallel)

    def tensor_parallel(self, degrees: Tensor) -> RingGroup:
        """Return the tensor-parallel groups of some degrees, `(C,)`."""
        return self._ring_group(degrees, self.topology.tensor_parallel)

    def _ring_group(self, degrees: Tensor, shape: Callable[[int], tuple[int, int]]) -> RingGroup:
        """Return groups from their ranks on a node and the nodes that they cross."""
        shapes = float_tensor([shape(int(degree)) for degree in degrees.tolist()])
        local, nodes = shapes.unbind(1)
        gpus = torch.full_like(local, self.topology.gpus_per_node)
        return RingGroup(local, nodes, gpus, *self.links)

    @cached_property
    def width(self) -> int:
        """Bytes of one activation element."""
        return element_bytes(self.training)

    @cached_property
    def state(self) -> StateBytes:
        """Bytes per parameter of trained weights."""
        return state_bytes(self.training.precision, self.training.optimizer, self.software)

    def measured_figure(self, layer: LayerSpec, name: str, otherwise: Tensor) -> Tensor:
        """Return a field of `Measured` for a layer, `(O, C)`; `otherwise` where it was not measured.

        Figures of a captured block are priced, not measured: they move with the device as
            `otherwise` does.
        """
        if self.measured is None:
            return otherwise
        sizes = self.choices.tokens / self.training.seq_len
        degrees = self.choices.tp, self.choices.sequence_shards
        known = self.measured.figures(self.device.name, layer.kind, degrees, sizes, name)
        if known is None or not layer.captured:
            return otherwise if known is None else known
        here = otherwise.detach()
        return known * torch.where(here > 0.0, otherwise / here.clamp(min=1e-30), 1.0)
