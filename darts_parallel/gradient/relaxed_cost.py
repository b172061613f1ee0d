"""The surrogate: the cost table read with softmax weights, differentiable in them.

Every expected cost is linear in the weights of a layer's strategies, so that one matrix product with the
figures of the table (seconds, bytes, layouts) gives those of all layers, and one more with the stage weights
their sums. What is not linear follows: what lies between two layers (bilinear), the slowest stage and the
largest layer at work.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from darts_parallel.cost import (
    ACTIVATION,
    OPTIMIZER,
    CostTable,
    PassSeconds,
    PathMemory,
    lengthening,
    pipeline_seconds,
    simulated_seconds,
)
from darts_parallel.gradient.relaxation import smooth_max

PASSES = ("forward", "backward", "weight_gradient")


@dataclass(frozen=True)
class RelaxedPlans:
    """Hold R relaxed plans for each of the O outer choices of a table.

    `choices` (O, R, L, C): weights of every layer's strategies, summing to 1; `stages` (O, R, L, K):
    weights of every layer's stage, summing to 1; `fractions` (O, R, pp, 2): shares of activations and of
    optimizer state in host memory, None where the table's plans do not offload.
    """

    choices: Tensor
    stages: Tensor
    fractions: Tensor | None = None


@dataclass(frozen=True)
class SurrogateCost:
    """Hold expected costs; seconds and bytes."""

    iteration_time: Tensor
    """Seconds, shape `(O, R)`."""
    stage_seconds: Tensor
    """Seconds of every device of the pipeline, all its stages together, `(O, R, pp)`."""
    memory: Tensor
    """Bytes, shape `(O, R, pp)`."""
    sync: Tensor
    """Seconds of gradient synchronisation and optimizer step that the iteration waits for, `(O, R)`."""
    capacity: Tensor
    """Bytes that a device of every stage can give, `(pp,)`."""


def surrogate(
    weights: RelaxedPlans,
    table: CostTable,
    sharpness: float | None = None,
    paths: PathMemory | None = None,
) -> SurrogateCost:
    """Price relaxed plans once; `Surrogate` keeps what many steps need of the table."""
    return Surrogate(table)(weights, sharpness, paths)


class Surrogate:
    """Price relaxed plans of one table: at one-hot weights and exact maxima it equals `evaluate_batch`."""

    def __init__(self, table: CostTable) -> None:
        passes = PASSES if table.pipeline.simulated or table.host else ()
        by_kind = {name: getattr(table, name) for name in ("time", "sync", *passes)}
        plain = {name: getattr(table, name) for name in ("per_iteration", "static", "activation")}
        if (host := table.host) is not None:
            by_kind |= {"transfer": host.transfer, "state_transfer": host.state_transfer}
            plain["state"] = host.state
        columns = [values.permute(0, 2, 3, 1) for values in by_kind.values()]
        columns += [values.unsqueeze(-1) for values in (*plain.values(), table.working)]
        layouts = torch.nn.functional.one_hot(table.layout, table.num_layouts).double()
        self.table, self._names = table, (*by_kind, *plain)
        self._widths = [column.shape[-1] for column in columns[:-1]]
        self._figures = torch.cat([*columns, layouts.expand(*columns[0].shape[:2], -1, -1)], dim=-1)
        self._stage_kind = torch.nn.functional.one_hot(
            table.stage_kind, table.time.shape[1]
        ).double()
        borders = max(table.p2p.shape[1], 1)
        self._boundary_kind = torch.nn.functional.one_hot(table.boundary_kind, borders).double()
        seconds = torch.cat([table.reshard, table.p2p], dim=1).permute(0, 2, 3, 1, 4)
        self._between = seconds.flatten(3)
        """Seconds from layout to layout by kind of stage and of boundary, `(O, L - 1, Y, (Q + P) * Y)`."""

    def __call__(
        self, weights: RelaxedPlans, sharpness: float | None = None, paths: PathMemory | None = None
    ) -> SurrogateCost:
        """Return the expected costs.

        Args:
            sharpness: Sharpness of the smooth maxima; None for exact ones. A simulated pipeline has exact
                ones whatever it says: its gradient is that of the critical path.
            paths: Critical paths of a simulated pipeline that stand in for it between simulations.
        """
        table, fractions = self.table, weights.fractions
        expected = (weights.choices.transpose(1, 2) @ self._figures).transpose(1, 2)
        sizes = [sum(self._widths), 1, table.num_layouts]
        figures, working, layouts = torch.split(expected, sizes, dim=-1)
        sums = torch.split(weights.stages.transpose(-1, -2) @ figures, self._widths, dim=-1)
        read = zip(self._names, sums, strict=True)
        stage = {name: _of_kind(values, self._stage_kind) for name, values in read}
        inside, across = self._neighbour_seconds(weights.stages, layouts)
        seconds = stage["time"] + inside
        if fractions is not None and table.host is not None:
            passes = (stage["forward"], stage["backward"])
            extra_seconds = lengthening(table, table.host, fractions, stage["transfer"], passes)
            for name, extra in zip(("forward", "backward"), extra_seconds, strict=True):
                stage[name], seconds = stage[name] + extra, seconds + extra
        if table.pipeline.blocking:
            seconds = seconds + torch.nn.functional.pad(across, (1, 0))
        syncs = table.by_device(stage["sync"])
        if fractions is not None:
            syncs = syncs + fractions[..., OPTIMIZER] * table.by_device(stage["state_transfer"])
        if table.pipeline.simulated:
            total, sync = self._simulated(stage, inside, across, syncs, paths)
        else:
            slowest, sync = smooth_max(torch.stack([seconds, syncs]), sharpness)
            total = pipeline_seconds(seconds, table.num_micro_batches.unsqueeze(1), slowest) + sync
        total = total + stage["per_iteration"].sum(-1)
        activation = figures[..., sum(self._widths[: self._names.index("activation")])].unsqueeze(
            -1
        )
        memory = self._memory(weights, stage, working, activation, sharpness)
        return SurrogateCost(total, table.by_device(seconds), memory, sync, table.capacity)

    def _neighbour_seconds(self, stages: Tensor, layouts: Tensor) -> tuple[Tensor, Tensor]:
        """Return resharding inside stages `(O, R, K)`, and p2p between them `(O, R, K - 1)`, both ways.

        Args:
            stages: Weights of every layer's stage, `(O, R, L, K)`.
            layouts: Weights of every layer's layouts, `(O, R, L, Y)`.
        """
        table = self.table
        before, after = stages[..., :-1, :], stages[..., 1:, :]
        kinds, borders = self._stage_kind.shape[1], self._boundary_kind.shape[1]
        if table.num_layouts == 1:
            inside = torch.zeros_like(stages[..., 0, :])
            p2p = table.p2p[..., 0, 0].transpose(1, 2).unsqueeze(1)
        else:
            # bilinear: one matrix product for the layouts before, without a tensor of all pairs
            held, following = (
                layouts[..., :-1, :].transpose(1, 2),
                layouts[..., 1:, :].transpose(1, 2),
            )
            reached = torch.unflatten(held @ self._between, -1, (-1, table.num_layouts))
            change = (reached * following.unsqueeze(-2)).sum(-1).transpose(1, 2)
            reshard, p2p = change[..., :kinds], change[..., kinds:]
            inside = _of_kind((before * after).transpose(-1, -2) @ reshard, self._stage_kind)
        if table.pp == 1:
            return inside, inside[..., :0]
        p2p = p2p.expand(*stages.shape[:2], -1, borders)
        crossing = (before[..., :-1] * after[..., 1:]).transpose(-1, -2) @ p2p
        return inside, _of_kind(crossing, self._boundary_kind)

    def _simulated(
        self,
        stage: dict[str, Tensor],
        inside: Tensor,
        across: Tensor,
        sync: Tensor,
        paths: PathMemory | None,
    ) -> tuple[Tensor, Tensor]:
        """Return seconds until all stages are done, and what synchronisation adds to them, `(O, R)`."""
        table, size = self.table, inside.shape[:2]
        forward, backward, weight = (stage[name].flatten(0, 1) for name in PASSES)
        half, sync = inside.flatten(0, 1) / 2, sync.flatten(0, 1)
        passes = PassSeconds(forward + half, backward + half, weight, across.flatten(0, 1) / 2)
        counts = table.num_micro_batches.repeat_interleave(size[1])
        if paths is not None:
            total, awaited = paths.seconds(passes, sync, counts, table.pp, table.pipeline)
        else:
            total, ends = simulated_seconds(passes, sync, counts, table.pp, table.pipeline)
            awaited = total - ends.amax(1)
        return total.view(size), awaited.view(size)

    def _memory(
        self,
        weights: RelaxedPlans,
        stage: dict[str, Tensor],
        working: Tensor,
        activation: Tensor,
        sharpness: float | None,
    ) -> Tensor:
        """Return bytes of every device, `(O, R, pp)`; of every layer at work and in flight `(O, R, L, 1)`."""
        table, fractions = self.table, weights.fractions
        flying = table.in_flight.unsqueeze(1) * stage["activation"]
        away: Tensor | float = 0.0
        if fractions is not None:
            sent = fractions[..., ACTIVATION]
            away = fractions[..., OPTIMIZER] * table.by_device(stage["state"])
            flying = (1.0 - sent[..., table.stage_device]) * flying
            # the largest layer's activations are still on their way
            working = working + sent.unsqueeze(-2) * activation
        at_work = smooth_max(table.by_device(weights.stages) * working, sharpness, dim=-2)
        return table.by_device(stage["static"] + flying) - away + at_work


def _of_kind(values: Tensor, kinds: Tensor) -> Tensor:
    """Read every stage's value of its own kind, `(..., K)`, of values by kind `(..., K, Q)`."""
    return values.squeeze(-1) if values.shape[-1] == 1 else (values * kinds).sum(-1)
