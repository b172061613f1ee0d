"""FASOP's own answer: all strategies at all rotations, its partition heuristic, its program's costs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from baselines.fasop import TICK, Floats, Integers, middle_comm, minmax_partition
from experiments.fasop.costs import Batch, CostModel, Flags, memory_bytes
from experiments.fasop.recurrence import stage_ends
from experiments.fasop.setting import Degrees, Offer, cyclic_placements, enumerate_degrees


@dataclass(frozen=True)
class FasopPlan:
    """A strategy with its placement and partition, and what the program says about it."""

    degrees: Degrees
    layers_per_stage: tuple[int, ...]
    placement: tuple[int, ...]
    """Type of every node in pipeline order."""
    seconds: float
    """Of one step."""
    fits: bool
    """Whether the program's memory estimate fits every GPU."""

    def to_dict(self, offer: Offer) -> dict[str, Any]:
        """The entry of the plan in a file."""
        return {
            "tp": self.degrees.tp,
            "dp": self.degrees.dp,
            "pp": self.degrees.pp,
            "micro_batch_size": self.degrees.micro_batch_size,
            "layers_per_stage": list(self.layers_per_stage),
            "nodes": [offer.types[kind].name for kind in self.placement],
        }


@dataclass(frozen=True)
class Priced:
    """Partitions of a batch with their costs."""

    batch: Batch
    counts: Integers
    """Layers of every stage, `(B, pp)`."""
    seconds: Floats
    """Of one step, `(B,)`."""
    fits: Flags
    """`(B,)`."""

    def plan(self, row: int) -> FasopPlan:
        """Row number `row` as a plan."""
        return FasopPlan(
            degrees=self.batch.degrees,
            layers_per_stage=tuple(self.counts[row].tolist()),
            placement=tuple(self.batch.placements[row].tolist()),
            seconds=float(self.seconds[row]),
            fits=bool(self.fits[row]),
        )


def pipeline_ends(batch: Batch, ticks: Integers) -> Floats:
    """When every stage has ended its micro-batches, seconds `(B, pp)`.

    Args:
        batch: B strategies.
        ticks: A micro-batch in every stage, `(B, pp)`.
    """
    seconds: Floats = ticks * np.float64(TICK)
    if batch.degrees.pp == 1:
        return seconds * batch.num_micro_batches
    return stage_ends(seconds, batch.p2p[:, 0], batch.p2p[:, -1], batch.num_micro_batches)


def price(batch: Batch, counts: Integers, model: CostModel, priced: Integers | None = None) -> Priced:
    """Seconds of a step and memory of given partitions.

    Args:
        batch: B strategies.
        counts: Layers of every stage, `(B, pp)`.
        model: Costs of their job.
        priced: Layers that the stage times are taken from, where they are not `counts`.
    """
    ends = pipeline_ends(batch, batch.stage_ticks(counts if priced is None else priced))
    seconds = (ends + batch.sync_seconds(counts, model.job)).max(1) + batch.embedding_sync
    fits: Flags = np.all(memory_bytes(batch, counts, model.job) <= batch.capacity, axis=1)
    return Priced(batch, counts, seconds, fits)


def program_partition(batch: Batch, model: CostModel) -> tuple[Integers, Integers]:
    """Layers of every stage as FASOP's program reports them, and as it prices them; `(B, pp)` each."""
    if model.job.encoder_decoder and batch.degrees.pp > 1:
        counts = _encoder_decoder(batch, model)
        return counts, counts
    return minmax_partition(batch.layers.ticks, batch.stage_type, middle_comm(batch.p2p))


def program_price(batch: Batch, model: CostModel) -> Priced:
    """Partition and costs of every strategy as FASOP's program has them."""
    reported, priced = program_partition(batch, model)
    return price(batch, reported, model, priced)


def _encoder_decoder(batch: Batch, model: CostModel) -> Integers:
    """The best split of the stages between encoder and decoder, by the end of the pipeline alone.

    Both halves are partitioned with the costs and the boundaries of the encoder, and priced with their own.
    """
    half = batch.layers.num_layers // 2
    stages, rows = batch.degrees.pp, len(batch)
    splits = encoder_stages(stages, half)
    ticks = batch.layers.ticks[:, : half + 1]
    encoder: dict[int, Integers] = {}
    decoder: dict[int, Integers] = {}
    for width in {*splits, *(stages - split for split in splits)}:
        kinds = np.concatenate([batch.stage_type[:, :width], batch.stage_type[:, stages - width :]])
        comm = np.tile(middle_comm(batch.p2p[:, : width - 1]), (2, 1))
        counts = minmax_partition(ticks, kinds, comm)[0]
        encoder[width], decoder[width] = counts[:rows], counts[rows:]
    counts = np.stack([np.concatenate([encoder[n], decoder[stages - n]], axis=1) for n in splits])
    every = batch[np.tile(np.arange(rows), len(splits))]
    ends = pipeline_ends(every, every.stage_ticks(counts.reshape(-1, stages)))[:, 0]
    best = ends.reshape(len(splits), rows).argmin(0)
    chosen: Integers = counts[best, np.arange(rows)]
    return chosen


def encoder_stages(stages: int, half: int) -> range:
    """Numbers of encoder stages that leave the decoder a stage, and at most one for each of its blocks."""
    return range(max(1, stages - (half - 1)), min(stages, half))


def program_strategies(
    model: CostModel, clusters: Sequence[tuple[int, ...]]
) -> Iterator[tuple[Priced, Integers]]:
    """All strategies of clusters with equally many nodes, priced.

    Args:
        model: Costs of the job.
        clusters: Nodes of each type, equal in sum.

    Yields:
        A batch, and the cluster of each of its rows as an index.
    """
    rotations = [cyclic_placements(counts) for counts in clusters]
    placements = np.concatenate(rotations)
    owner = np.repeat(np.arange(len(clusters)), [len(rows) for rows in rotations])
    for degrees in enumerate_degrees(model.job, model.offer.gpus_per_node, placements.shape[1]):
        yield program_price(model.batch(degrees, placements), model), owner


def program_plans(model: CostModel, clusters: Sequence[tuple[int, ...]]) -> list[FasopPlan | None]:
    """The plan that FASOP's program prints first of those that fit, for clusters with equally many nodes.

    Args:
        model: Costs of the job.
        clusters: Nodes of each type.
    """
    best: list[FasopPlan | None] = [None] * len(clusters)
    for priced, owner in program_strategies(model, clusters):
        seconds = np.where(priced.fits, priced.seconds, np.inf)
        for index in range(len(clusters)):
            rows = np.flatnonzero(owner == index)
            row = int(rows[seconds[rows].argmin()])
            known = best[index]
            if np.isfinite(seconds[row]) and (known is None or seconds[row] < known.seconds):
                best[index] = priced.plan(row)
    return best
