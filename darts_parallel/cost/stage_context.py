"""The training job on one kind of stage: what every price of a layer is read from."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from darts_parallel.config import TrainingConfig
from darts_parallel.cost.choices import ChoiceTensors, element_bytes
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

    @property
    def group(self) -> NodeGroup:
        """Node group that decides the stage's speed."""
        return self.cluster.groups[self.topology.group]

    @property
    def device(self) -> Device:
        """Device of the stage."""
        return self.group.device

    @cached_property
    def links(self) -> tuple[Link, Link]:
        """Link inside a node, and the one between nodes, of the stage's collectives."""
        return self.cluster.stage_links(self.topology)

    @property
    def width(self) -> int:
        """Bytes of one activation element."""
        return element_bytes(self.training)

    @property
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
