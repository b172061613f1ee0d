"""The best uniform plan of every one of many clusters, searched in one batch.

A row is a cluster, a pipeline degree, an order of its nodes, a number of micro-batches and a strategy for all
layers. All rows are bounded at once; then, round by round, the most promising rows of all clusters are split
into stages together (`SplitProblems`), until no open row of a cluster can beat its best plan.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from darts_parallel.cost import CostTable, HardPlans, without_dominated
from darts_parallel.exact._batched_splits import TOLERANCE, SplitProblems
from darts_parallel.exact.segments import Array, Index, StageSegments, prefix_sums, segment_max
from darts_parallel.plan import Plan

ROUND = 6
"""Rows of every cluster that are split in the first round; doubled from round to round."""
REFINED, NEAR, REFINEMENTS = 6, 1.01, 12
"""Rows of a cluster whose synchronisation is lowered: how many, how near the best, in how many steps."""
ELEMENTS = 6_000_000
"""Segments whose seconds are held in memory at once."""


def best_uniform_plans(
    owner: Sequence[int], tables: Sequence[CostTable], num_clusters: int
) -> list[tuple[Plan, int] | None]:
    """Find the best uniform plan of every cluster, and the number of its table; None where none fits.

    Args:
        owner: Cluster of every table.
        tables: Priced by the closed form, one stage a device.
        num_clusters: Clusters, which may own no table.
    """
    batch = _ClusterRows(owner, tables, num_clusters)
    batch.run()
    return [batch.answer(number) for number in range(num_clusters)]


@dataclass(frozen=True)
class _UniformCosts:
    """Costs that tables share, by uniform configuration (number of micro-batches and strategy), B of them."""

    outer: Index
    choice: Index
    """Strategy, as a number of the table."""
    count: Array
    time: Array
    """Seconds of a micro-batch, `(B, Q, L)`."""
    sync: Array
    kept: Array
    """Bytes, `(B, L)`."""
    activation: Array
    working: Array
    p2p: Array
    """Seconds of a boundary before layer l + 1, `(B, P, L - 1)`."""
    runs: Array
    """Whether a kind runs the strategy, `(B, Q)`."""

    @staticmethod
    def read(table: CostTable) -> "_UniformCosts":
        """Read all configurations but those whose strategy another one beats in everything."""
        # what is paid once depends on the layout alone, and dominance is asked within a layout
        kept = set(without_dominated(replace(table, per_iteration=torch.zeros_like(table.static))).choices)
        undominated = np.array([choice in kept for choice in table.choices])
        outer, choice = np.nonzero(table.allowed.numpy() & undominated)
        layout = table.layout.numpy()[choice]

        def rows(values: Array) -> Array:
            return np.moveaxis(values, -1, 1)[outer, choice]

        kinds = table.forward.shape[1]
        runs = np.ones((kinds, len(table.choices)), dtype=bool)
        if table.kind_allowed is not None:
            runs = table.kind_allowed.numpy()
        return _UniformCosts(
            outer=outer,
            choice=choice,
            count=table.num_micro_batches.numpy()[outer].astype(float),
            time=rows(table.time.detach().numpy()),
            sync=rows(table.sync.detach().numpy()),
            kept=rows(table.static.numpy()),
            activation=rows(table.activation.numpy()),
            working=rows(table.working.numpy()),
            p2p=table.p2p.detach().numpy()[outer, :, :, layout, layout],
            runs=runs[:, choice].T,
        )


class _ClusterRows:
    """All rows of all clusters, and the best plan of each so far."""

    def __init__(self, owner: Sequence[int], tables: Sequence[CostTable], num_clusters: int) -> None:
        self.owner, self.tables = np.array(owner, dtype=np.int64), list(tables)
        self.costs: dict[int, _UniformCosts] = {}
        self.best = np.full(num_clusters, np.inf)
        self.winner: dict[int, tuple[int, int, Index]] = {}
        parts = [self._bounds(number) for number in range(len(tables))]
        sizes = [len(part) for part in parts]
        self.table = np.repeat(np.arange(len(parts)), sizes)
        self.row = np.concatenate([np.arange(size) for size in sizes]) if parts else np.zeros(0, np.int64)
        self.bound = np.concatenate(parts) if parts else np.zeros(0)
        self.open = np.isfinite(self.bound)
        self.cost, self.sync = np.full(len(self.bound), np.inf), np.full(len(self.bound), np.inf)

    def shared(self, number: int) -> _UniformCosts:
        """Return costs of a table, read once for all that share them."""
        table = self.tables[number]
        if id(table.forward) not in self.costs:
            self.costs[id(table.forward)] = _UniformCosts.read(table)
        return self.costs[id(table.forward)]

    def run(self) -> None:
        """Split the most promising rows of all clusters, round by round, until none can win."""
        quota = ROUND
        while True:
            owner = self.owner[self.table]
            self.open &= self.bound < self.best[owner] * (1 - 1e-12)
            rows = np.flatnonzero(self.open)
            if not len(rows):
                break
            self._split(_leading(rows, self.bound[rows], owner[rows], quota))
            quota *= 2
        self._refine()

    def _refine(self) -> None:
        """Split the best rows again with less and less synchronisation, as long as they may gain."""
        owner = self.owner[self.table]
        rows = np.flatnonzero(self.cost < self.best[owner] * NEAR)
        rows = _leading(rows, self.cost[rows], owner[rows], REFINED) if len(rows) else rows
        for _ in range(REFINEMENTS):
            if not len(rows):
                return
            self._split(rows, self.sync[rows] * (1 - 1e-12))
            rows = rows[np.isfinite(self.sync[rows])]

    def _split(self, rows: Index, most_sync: Array | None = None) -> None:
        """Split rows into stages, those of equal depth together, and note the best of each cluster."""
        most_sync = np.full(len(rows), np.inf) if most_sync is None else most_sync
        self.open[rows] = False
        depth = np.array([table.pp for table in self.tables], dtype=np.int64)[self.table[rows]]
        for pp in np.unique(depth).tolist():
            mine = np.flatnonzero(depth == pp)
            size = max(ELEMENTS // (pp * (self.tables[0].num_layers + 1) ** 2), 1)
            for begin in range(0, len(mine), size):
                chunk = mine[begin : begin + size]
                self._split_chunk(rows[chunk], most_sync[chunk])

    def _split_chunk(self, rows: Index, most_sync: Array) -> None:
        splits = self._gather(rows, most_sync).best()
        self.cost[rows], self.sync[rows] = splits.cost, splits.sync
        for row, cost, starts in zip(rows.tolist(), splits.cost.tolist(), splits.first_layers, strict=True):
            number = int(self.table[row])
            cluster = int(self.owner[number])
            if cost < self.best[cluster]:
                self.best[cluster] = cost
                self.winner[cluster] = (number, int(self.row[row]), starts)

    def _gather(self, rows: Index, most_sync: Array) -> SplitProblems:
        """Collect the values of every stage under rows of equal depth; a stage takes at most `most_sync`."""
        parts = [self._gather_one(int(self.table[row]), int(self.row[row])) for row in rows.tolist()]
        column = {name: np.stack([part[name] for part in parts], axis=-1) for name in parts[0]}
        segments = StageSegments.legal(len(column["entry"]), self.tables[0].fused_to_previous.numpy())
        stage, first, end = segments.stage, segments.first, segments.end

        def summed(name: str) -> Array:
            prefix = column[name]
            return np.asarray(prefix[stage, end] - prefix[stage, first])

        peak = summed("kept") + segment_max(column["working"])[first, end]
        sync, seconds = summed("sync"), summed("time") + column["entry"][stage, first]
        fits = (peak <= column["capacity"][stage] * (1 + TOLERANCE)) & (sync <= most_sync)
        ceiling = self.best[self.owner[self.table[rows]]]
        seconds = np.where(fits, seconds, np.inf)
        return SplitProblems(segments, seconds, sync, column["later"], column["fixed"], ceiling)

    def _gather_one(self, number: int, row: int) -> dict[str, Array]:
        table, costs = self.tables[number], self.shared(number)
        kinds, outer = table.stage_kind.numpy(), costs.outer[row]
        entry = np.zeros((table.pp, table.num_layers + 1))
        entry[1:, 1:-1] = costs.p2p[row][table.boundary_kind.numpy()]
        per_iteration = table.per_iteration[outer, :, costs.choice[row]].sum()
        held = table.in_flight[outer].numpy()[:, None]
        return {
            "time": prefix_sums(costs.time[row])[kinds],
            "entry": entry,
            "kept": prefix_sums(costs.kept[row]) + held * prefix_sums(costs.activation[row]),
            "working": costs.working[row],
            "capacity": table.capacity.numpy(),
            "sync": prefix_sums(costs.sync[row])[kinds],
            "later": costs.count[row] - 1.0,
            "fixed": per_iteration.numpy(),
        }

    def answer(self, cluster: int) -> tuple[Plan, int] | None:
        """Return the best plan of a cluster, and the number of its table."""
        if cluster not in self.winner:
            return None
        number, row, starts = self.winner[cluster]
        table, costs = self.tables[number], self.shared(number)
        plans = HardPlans(
            torch.tensor([costs.outer[row]]),
            torch.full((1, table.num_layers), int(costs.choice[row])),
            torch.tensor(starts)[None],
        )
        return plans.to_plan(0, table), number

    def _bounds(self, number: int) -> Array:
        """Lower bound on the seconds of every uniform configuration of a table, `(B,)`.

        With weights that sum to 1 over the stages, the slowest stage takes at least the weighted mean of
        all; with the weights of a kind falling with its seconds, this is tight where layers are small.
        """
        table, costs = self.tables[number], self.shared(number)
        kinds, counts = np.unique(table.stage_kind.numpy(), return_counts=True)
        edges = table.boundary_kind.numpy()
        boundary = costs.p2p.min(axis=-1)[:, edges] if len(edges) else np.zeros((len(costs.count), 0))
        weight_of = _weights(costs.time[:, kinds], counts)
        entering = weight_of[:, np.searchsorted(kinds, table.stage_kind.numpy()[1:])]
        slowest = _weighted(costs.time[:, kinds], weight_of) + (entering * boundary).sum(axis=1)
        used = costs.time[:, kinds]
        expensive, cheap = used.max(axis=1), used.min(axis=1).sum(axis=1)
        slope = (((expensive[:, None] - used) / used).max(axis=-1) * counts).sum(axis=1)
        most, later = expensive.sum(axis=1), costs.count - 1.0
        far = np.where(slope > 0, (most - cheap) / np.where(slope > 0, slope, 1.0), 0.0)
        ends = [
            most - np.minimum(slope * t, most - cheap) + later * t
            for t in (slowest, np.maximum(slowest, far))
        ]
        sync = _weighted(costs.sync[:, kinds], _weights(costs.sync[:, kinds], counts))
        per_iteration = table.per_iteration.numpy()[costs.outer, :, costs.choice].sum(axis=-1)
        total = np.minimum(*ends) + boundary.sum(axis=1) + sync + per_iteration
        return np.where(costs.runs[:, kinds].all(axis=1), total, np.inf)


def _leading(rows: Index, value: Array, owner: Index, count: int) -> Index:
    """Return the `count` rows of every owner that have the smallest values."""
    order = np.lexsort((value, owner))
    first = np.r_[True, np.diff(owner[order]) != 0]
    rank = np.arange(len(rows)) - np.maximum.accumulate(np.where(first, np.arange(len(rows)), 0))
    return np.asarray(rows[order][rank < count])


def _weights(values: Array, counts: Index) -> Array:
    """Return weights of a stage of each kind, `(B, Q)`, summing to 1 over stages."""
    inverse = 1.0 / np.maximum(values.sum(axis=-1), 1e-300)
    return np.asarray(inverse / (inverse * counts).sum(axis=1, keepdims=True))


def _weighted(values: Array, weights: Array) -> Array:
    """Lower bound of the largest sum over stages of `values`, `(B, Q, L)`, from weights of the kinds."""
    bound = (values * weights[..., None]).min(axis=1).sum(axis=-1)
    return np.asarray(np.maximum(bound, values.min(axis=1).max(axis=-1)))
