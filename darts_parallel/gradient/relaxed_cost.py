"""The surrogate: the cost table read with softmax weights, differentiable in them.

Every expected cost is linear in the weights of a layer's strategies. So one matrix product with the
table's costs (seconds, bytes, layouts) gives those of all layers, and one more with the stage weights
their sums. The rest is not linear: resharding between two layers (bilinear), the slowest stage, and the
largest working memory.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from darts_parallel.cost import (
    ACTIVATION,
    COMPUTE,
    OPTIMIZER,
    PASSES,
    CostTable,
    PassSeconds,
    PathMemory,
    Tensors,
    kept_bytes,
    lengthened,
    lengthening,
    pipeline_seconds,
    simulated_seconds,
    stage_part,
)
from darts_parallel.gradient.relaxation import smooth_max


@dataclass(frozen=True)
class RelaxedPlans:
    """R relaxed plans for each of the O rows of a table.

    `choices` (O, R, L, C): weights of every layer's strategies, summing to 1; `stages` (O, R, L, K):
    weights of every layer's stage, summing to 1; `fractions` (O, R, pp, 2): shares of activations and of
    optimizer state in host memory, None where the table's plans do not offload.
    """

    choices: Tensor
    stages: Tensor
    fractions: Tensor | None = None


@dataclass(frozen=True)
class SurrogateCost:
    """Expected costs; seconds and bytes."""

    iteration_time: Tensor
    """Seconds, shape `(O, R)`."""
    stage_seconds: Tensor
    """Seconds of every device of the pipeline, all its stages together, `(O, R, pp)`."""
    memory: Tensor
    """Bytes, shape `(O, R, pp)`."""
    sync: Tensor
    """Seconds of gradient synchronisation and optimizer step that the iteration awaits, `(O, R)`."""
    capacity: Tensor
    """Bytes that a device of every stage can give, `(pp,)`."""


class Surrogate:
    """Price relaxed plans of one table: at one-hot weights and exact maxima as `evaluate_batch`."""

    def __init__(self, table: CostTable) -> None:
        self.table = table
        by_kind = _costs_by_kind(table)
        plain = {name: getattr(table, name) for name in ("per_iteration", "static", "activation")}
        if table.host is not None:
            plain["state"] = table.host.state
        columns = []
        for values in by_kind.values():
            columns.append(values.permute(0, 2, 3, 1))
        for values in plain.values():
            columns.append(values.unsqueeze(-1))
        self._names = (*by_kind, *plain)
        self._widths = [column.shape[-1] for column in columns]
        layouts = _one_hot(table.layout, table.num_layouts)
        size = columns[0].shape[:2]
        layouts = layouts.expand(*size, -1, -1)
        working = table.working.unsqueeze(-1)
        self._costs = torch.cat([*columns, working, layouts], dim=-1)
        """Costs of every layer under every strategy, side by side, `(O, L, C, .)`."""
        self._stage_kind = _one_hot(table.stage_kind, table.time.shape[1])
        boundaries = max(table.p2p.shape[1], 1)
        self._boundary_kind = _one_hot(table.boundary_kind, boundaries)
        seconds = torch.cat([table.reshard, table.p2p], dim=1)
        self._between = seconds.permute(0, 2, 3, 1, 4).flatten(3)
        """Seconds between layouts by kind of stage and boundary, `(O, L - 1, Y, (Q + P) * Y)`."""

    def __call__(
        self, weights: RelaxedPlans, sharpness: float | None = None, paths: PathMemory | None = None
    ) -> SurrogateCost:
        """Return the expected costs.

        Args:
            sharpness: Sharpness of the smooth maxima; None for exact ones. A simulated pipeline always
                has exact ones: its gradient is that of the critical path.
            paths: Critical paths that replace a simulated pipeline between simulations.
        """
        table = self.table
        expected = weights.choices.transpose(1, 2) @ self._costs
        expected = expected.transpose(1, 2)
        sizes = [sum(self._widths), 1, table.num_layouts]
        layers, working, layouts = torch.split(expected, sizes, dim=-1)
        stage = self._stage_costs(weights.stages, layers)
        inside, across = self._neighbour_seconds(weights.stages, layouts)
        seconds = stage["time"] + inside
        for name, extra in self._transfers(stage, weights.fractions).items():
            stage[name] = stage[name] + extra
            seconds = seconds + extra
        if table.pipeline.blocking:
            seconds = seconds + torch.nn.functional.pad(across, (1, 0))
        syncs = self._sync_seconds(stage, weights.fractions)
        memory = self._memory(weights, stage, layers, working, sharpness)
        own = self._own_seconds(weights, stage, seconds, syncs, memory)
        added = stage_part(own, seconds)
        if own:
            longer = lengthened(stage["forward"], stage["backward"], added)
            stage["forward"], stage["backward"] = longer
            seconds = seconds + added
        if table.simulated:
            total, sync = self._simulated(stage, (inside, across), syncs, paths)
        else:
            slowest, sync = smooth_max(torch.stack([seconds, syncs]), sharpness)
            counts = table.num_micro_batches.unsqueeze(1)
            total = pipeline_seconds(seconds, counts, slowest) + sync
        total = total + stage["per_iteration"].sum(-1)
        for once in own.values():
            if once.dim() < seconds.dim():
                total = total + once
        return SurrogateCost(total, table.by_device(seconds), memory, sync, table.capacity)

    def _memory(
        self,
        weights: RelaxedPlans,
        stage: Tensors,
        layers: Tensor,
        working: Tensor,
        sharpness: float | None,
    ) -> Tensor:
        """Return peak bytes of every device, `(O, R, pp)`, from the costs of stages and of layers."""
        table = self.table
        fractions = weights.fractions
        if fractions is not None:
            sent = fractions[..., ACTIVATION].unsqueeze(-2)
            # the largest layer's activations are still on their way
            column = sum(self._widths[: self._names.index("activation")])
            working = working + sent * layers[..., column].unsqueeze(-1)
        by_device = table.by_device(weights.stages) * working
        largest = smooth_max(by_device, sharpness, dim=-2)
        in_flight = table.in_flight.unsqueeze(1)
        activation = stage["activation"]
        if fractions is None:
            kept = kept_bytes(stage["static"], activation, in_flight)
            return table.by_device(kept) + largest
        stay = 1.0 - fractions[..., ACTIVATION][..., table.stage_device]
        kept = kept_bytes(stage["static"], stay * activation, in_flight)
        away = fractions[..., OPTIMIZER] * table.by_device(stage["state"])
        return table.by_device(kept) - away + largest

    def _own_seconds(
        self,
        weights: RelaxedPlans,
        stage: Tensors,
        seconds: Tensor,
        syncs: Tensor,
        memory: Tensor,
    ) -> Tensors:
        """Return the seconds of the user's own terms, `(O, R, K)` or `(O, R)`."""
        table = self.table
        if table.own is None:
            return {}
        size = syncs.shape[:2]
        compute = stage["compute"]
        communication = (seconds - compute).clamp(min=0.0)  # below 0 by rounding
        by_plan = {
            "stage_compute_s": compute,
            "stage_communication_s": communication,
            "device_memory_bytes": memory,
            "sync_s": syncs,
            "stage_weights": weights.stages,
            "layer_weights": weights.choices,
        }
        flat = {name: value.flatten(0, 1) for name, value in by_plan.items()}
        counts = table.num_micro_batches.repeat_interleave(size[1]).double()
        own = table.own_seconds(num_micro_batches=counts, **flat)
        return {name: torch.unflatten(added, 0, size) for name, added in own.items()}

    def _stage_costs(self, stages: Tensor, layers: Tensor) -> Tensors:
        """Return costs of all stages by name, `(O, R, K)`, from costs of layers `(O, R, L, .)`."""
        sums = stages.transpose(-1, -2) @ layers
        parts = torch.split(sums, self._widths, dim=-1)
        named = zip(self._names, parts, strict=True)
        return {name: _of_kind(values, self._stage_kind) for name, values in named}

    def _transfers(self, stage: Tensors, fractions: Tensor | None) -> Tensors:
        """Return the seconds by which transfers to host memory lengthen passes, `(O, R, K)` each."""
        host = self.table.host
        if fractions is None or host is None:
            return {}
        passes = (stage["forward"], stage["backward"])
        forward, backward = lengthening(self.table, host, fractions, stage["transfer"], passes)
        return {"forward": forward, "backward": backward}

    def _sync_seconds(self, stage: Tensors, fractions: Tensor | None) -> Tensor:
        """Return seconds of gradient synchronisation and optimizer step, `(O, R, pp)`."""
        syncs = self.table.by_device(stage["sync"])
        if fractions is None:
            return syncs
        transfers = self.table.by_device(stage["state_transfer"])
        return syncs + fractions[..., OPTIMIZER] * transfers

    def _neighbour_seconds(self, stages: Tensor, layouts: Tensor) -> tuple[Tensor, Tensor]:
        """Return resharding inside stages `(O, R, K)`, and p2p between them `(O, R, K - 1)`.

        Both directions together.

        Args:
            stages: Weights of every layer's stage, `(O, R, L, K)`.
            layouts: Weights of every layer's layouts, `(O, R, L, Y)`.
        """
        table = self.table
        before = stages[..., :-1, :]
        after = stages[..., 1:, :]
        if table.num_layouts == 1:
            inside = torch.zeros_like(stages[..., 0, :])
            p2p = table.p2p[..., 0, 0].transpose(1, 2)
            p2p = p2p.unsqueeze(1)
        else:
            kinds = self._stage_kind.shape[1]
            # bilinear: one matrix product for the earlier layouts, without a tensor of all pairs
            reached = layouts[..., :-1, :].transpose(1, 2) @ self._between
            reached = torch.unflatten(reached, -1, (-1, table.num_layouts))
            later = layouts[..., 1:, :].transpose(1, 2)
            change = (reached * later.unsqueeze(-2)).sum(-1).transpose(1, 2)
            together = (before * after).transpose(-1, -2)
            inside = _of_kind(together @ change[..., :kinds], self._stage_kind)
            p2p = change[..., kinds:]
        if table.pp == 1:
            return inside, inside[..., :0]
        boundaries = self._boundary_kind.shape[1]
        p2p = p2p.expand(*stages.shape[:2], -1, boundaries)
        parted = before[..., :-1] * after[..., 1:]
        crossing = parted.transpose(-1, -2) @ p2p
        return inside, _of_kind(crossing, self._boundary_kind)

    def _simulated(
        self,
        stage: Tensors,
        between: tuple[Tensor, Tensor],
        syncs: Tensor,
        paths: PathMemory | None,
    ) -> tuple[Tensor, Tensor]:
        """Return seconds until all stages are done, and those that synchronisation adds, `(O, R)`.

        Args:
            between: Resharding inside stages, half forward and half backward, and p2p between them.
        """
        forward, backward, weight = (stage[name].flatten(0, 1) for name in PASSES)
        half, message = (seconds.flatten(0, 1) / 2 for seconds in between)
        passes = PassSeconds(forward + half, backward + half, weight, message)
        table = self.table
        size = syncs.shape[:2]
        counts = table.num_micro_batches.repeat_interleave(size[1])
        syncs = syncs.flatten(0, 1)
        if paths is not None:
            total, awaited = paths.seconds(passes, syncs, counts, table.pipeline)
        else:
            total, ends = simulated_seconds(passes, syncs, counts, table.pipeline)
            awaited = total - ends.amax(1)
        return total.view(size), awaited.view(size)


def _costs_by_kind(table: CostTable) -> Tensors:
    """Return the seconds that the surrogate of a table needs by kind of stage, `(O, Q, L, C)` each."""
    by_kind = {"time": table.time, "sync": table.sync}
    if table.own is not None:
        by_kind["compute"] = torch.stack([table.terms[name] for name in COMPUTE]).sum(0)
    if table.simulated or table.host or table.own:
        by_kind |= {name: getattr(table, name) for name in PASSES}
    if table.host is not None:
        by_kind["transfer"] = table.host.transfer
        by_kind["state_transfer"] = table.host.state_transfer
    return by_kind


def _one_hot(numbers: Tensor, count: int) -> Tensor:
    return torch.nn.functional.one_hot(numbers, count).double()


def _of_kind(values: Tensor, kinds: Tensor) -> Tensor:
    """Read every stage's value of its own kind, `(..., K)`, of values by kind `(..., K, Q)`."""
    if values.shape[-1] == 1:
        return values.squeeze(-1)
    return (values * kinds).sum(-1)
