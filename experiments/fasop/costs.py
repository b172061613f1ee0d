"""FASOP's costs of strategies over many placements at once, as its published program computes them.

Source: FASOP (HPDC'24) and its program. Where the program departs from physics the docstring says so: these
costs are for reproducing its figures; `darts_parallel.cost.evaluation.evaluate` is the project's own model.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from baselines.fasop import TICK, Floats, Integers
from darts_parallel.errors import ConfigError
from darts_parallel.problem.layer_profiles import LayerProfile, Profiles
from experiments.fasop.setting import Degrees, Job, Offer

Flags = NDArray[np.bool_]
BITS = 16
"""Of an element that is sent."""
BOTTLENECKS = (1.05, 3.5)
"""What divides the bandwidth of a send between nodes and inside a node; fitted by FASOP's authors."""
BIAS_PARAMETERS = 20800
"""Of a layer, beside the 12 hidden^2 of its matrices; the program has the same number for all models."""
STATE_BYTES = 18
"""Bytes of a parameter with its gradient and optimizer state."""
MEMORY_MARGIN = 1.10


@dataclass(frozen=True)
class LayerCosts:
    """The chain of L layers at one tensor-parallel degree and micro-batch size."""

    ticks: Integers
    """Forward and backward of the first layers of the chain by node type, prefix sums, `(types, L + 1)`."""
    parameters: Floats
    """Of the first layers, on one GPU, embeddings left out, prefix sums, `(L + 1,)`."""
    embedding: Integers
    """Layers with a vocabulary matrix among the first layers, `(L + 1,)`."""

    @property
    def num_layers(self) -> int:
        """Layers of the chain, embedding and post-process included."""
        return len(self.parameters) - 1


class CostModel:
    """Costs of one job on nodes of one offer; keeps what strategies share."""

    def __init__(self, job: Job, offer: Offer, profiles: Profiles) -> None:
        self.job = job
        self.offer = offer
        self.profiles = profiles
        self.layers = lru_cache(maxsize=None)(self._layers)

    def _layers(self, tp: int, micro_batch_size: int) -> LayerCosts:
        """Costs of the layers.

        Errors:
            ConfigError: a type of node, or the degree, is not in the profile, or has other layers.
        """
        job = self.job
        chains = [self._chain(kind.device, tp) for kind in self.offer.types]
        ticks = np.zeros((len(chains), job.num_layers + 1), dtype=np.int64)
        for row, chain in zip(ticks, chains, strict=True):
            # the program prices both embeddings by the encoder's
            factor = {
                kind: self.profiles.multiplier(
                    job.model, chain.gpu, kind.replace("decoder_emb", "encoder_emb"), micro_batch_size
                )
                for kind in set(chain.kinds)
            }
            seconds = [
                3.0 * time * factor[kind] for time, kind in zip(chain.forward_s, chain.kinds, strict=True)
            ]
            row[1:] = np.rint(np.array(seconds) / TICK).astype(np.int64).cumsum()
        has_vocabulary = np.array([k.endswith("embedding") or k == "post_process" for k in chains[0].kinds])
        block = (12 * job.hidden_size**2 + BIAS_PARAMETERS) / tp
        matrices = np.pad(has_vocabulary.astype(np.int64).cumsum(), (1, 0))
        return LayerCosts(ticks, _prefix(np.where(has_vocabulary, 0.0, block)), matrices)

    def _chain(self, device: str, tp: int) -> LayerProfile:
        """The measured layers of the job on one type of node."""
        chain = self.profiles.find(self.job.model, device, tp)
        if len(chain.kinds) != self.job.num_layers:
            raise ConfigError(
                f"{self.profiles.path}: model {chain.model} on {chain.gpu} has {len(chain.kinds)} layers at "
                f"tp={tp}, which must be {self.job.num_layers}; try {self.job.num_layers}."
            )
        return chain

    def batch(self, degrees: Degrees, placements: Integers) -> "Batch":
        """Costs of `degrees` at every row of `placements`, `(B, nodes)` of type numbers."""
        tp, dp, pp = degrees.tp, degrees.dp, degrees.pp
        layers = self.layers(tp, degrees.micro_batch_size)
        per_node, size = self.offer.gpus_per_node, tp * dp
        first = np.arange(pp) * size // per_node
        last = (np.arange(1, pp + 1) * size - 1) // per_node
        stage_type = np.stack(
            [placements[:, a : b + 1].max(1) for a, b in zip(first, last, strict=True)], axis=1
        )
        memory = np.array([kind.memory for kind in self.offer.types])
        return Batch(
            degrees=degrees,
            num_micro_batches=degrees.num_micro_batches(self.job),
            placements=placements,
            layers=layers,
            stage_type=stage_type,
            p2p=self._p2p(degrees, placements),
            sync=self._sync(degrees, placements, stage_type),
            embedding_sync=self._embedding_sync(degrees, placements),
            capacity=memory[stage_type],
        )

    def _link(self, placements: Integers, here: Integers, there: Integers) -> tuple[Floats, Floats]:
        """Bit/s between pairs of nodes `(...)`, `(B, ...)`, and whether they are the same node."""
        inter = np.array([kind.inter_bandwidth for kind in self.offer.types])[placements]
        intra = np.array([kind.intra_bandwidth for kind in self.offer.types])[placements]
        same = here == there
        between = np.minimum(inter[:, here], inter[:, there])
        return np.where(same, intra[:, here], between), same

    def _p2p(self, degrees: Degrees, placements: Integers) -> Floats:
        """Seconds of sending activations over every boundary, `(B, pp - 1)`; not divided by tp."""
        tp, dp, pp = degrees.tp, degrees.dp, degrees.pp
        rank = np.arange(pp - 1)[:, None] * tp * dp + tp * np.arange(dp)
        here, there = (r // self.offer.gpus_per_node for r in (rank, rank + tp * dp))
        bandwidth, same = self._link(placements, here, there)
        between, inside = BOTTLENECKS
        bandwidth = np.where(same, bandwidth / inside, bandwidth / dp / tp / between)
        bits = degrees.micro_batch_size * self.job.seq_len * self.job.hidden_size * BITS
        return (bits / bandwidth).max(2) if pp > 1 else np.zeros((len(placements), 0))

    def _sync(self, degrees: Degrees, placements: Integers, stage_type: Integers) -> Floats:
        """Seconds of the gradient all-reduce for each parameter of stage 0, by stage, `(B, pp)`.

        The program takes parameters and ring of stage 0 for all stages, the ring of the last tp rank.
        """
        tp, dp, per_node = degrees.tp, degrees.dp, self.offer.gpus_per_node
        if dp == 1:
            return np.zeros(stage_type.shape)
        here = (tp * np.arange(dp) + tp - 1) // per_node
        bandwidth = self._link(placements, here, np.roll(here, -1))[0].min(1, keepdims=True)
        share = np.ones(stage_type.shape)
        if tp * dp >= per_node:
            share *= tp
        elif tp > 1:
            shared = np.array([kind.shares_bus for kind in self.offer.types])[stage_type]
            share = np.where(shared, per_node / dp, 1.0)
        ring: Floats = 2 * (dp - 1) / dp * BITS / (bandwidth / share)
        return ring

    def _embedding_sync(self, degrees: Degrees, placements: Integers) -> Floats:
        """Seconds of the all-reduce of the tied embedding, `(B,)`; of the last dp rank."""
        tp, dp, pp, per_node = degrees.tp, degrees.dp, degrees.pp, self.offer.gpus_per_node
        if pp == 1 or self.job.encoder_decoder:
            return np.zeros(len(placements))
        rank = np.array(tp * (dp - 1))
        here, there = rank // per_node, (rank + tp * dp * (pp - 1)) // per_node
        bandwidth = self._link(placements, here, there)[0] / min(dp, per_node)
        seconds: Floats = self.job.hidden_size * self.job.vocab_size * BITS / bandwidth / tp
        return seconds


@dataclass(frozen=True)
class Batch:
    """Strategies of equal degrees, one for each of B placements, still without their partition."""

    degrees: Degrees
    num_micro_batches: int
    placements: Integers
    """Node types in pipeline order, `(B, nodes)`."""
    layers: LayerCosts
    stage_type: Integers
    """Type that a stage counts as, `(B, pp)`."""
    p2p: Floats
    """Seconds over every boundary, `(B, pp - 1)`."""
    sync: Floats
    """Seconds of the gradient all-reduce for each parameter of stage 0, `(B, pp)`."""
    embedding_sync: Floats
    """Seconds, `(B,)`."""
    capacity: Floats
    """Bytes of a GPU of every stage, `(B, pp)`."""

    def __len__(self) -> int:
        return len(self.placements)

    def __getitem__(self, rows: Integers | slice) -> "Batch":
        return Batch(
            self.degrees, self.num_micro_batches, self.placements[rows], self.layers, self.stage_type[rows],
            self.p2p[rows], self.sync[rows], self.embedding_sync[rows], self.capacity[rows],
        )  # fmt: skip

    def stage_ticks(self, counts: Integers) -> Integers:
        """Ticks of a micro-batch in every stage, `(B, pp)`, for `counts` layers of it."""
        end = counts.cumsum(1)
        prefix = self.layers.ticks
        ticks: Integers = prefix[self.stage_type, end] - prefix[self.stage_type, end - counts]
        return ticks

    def sync_seconds(self, counts: Integers, job: Job) -> Floats:
        """Seconds of the gradient all-reduce of every stage, `(B, pp)`."""
        first = counts[:, 0]
        held = self.layers.parameters[first]
        # the vocabulary matrix counts once, and whole: not divided by tp
        held = held + np.where(self.layers.embedding[first] > 0, job.hidden_size * job.vocab_size, 0)
        return self.sync * held[:, None]


def memory_bytes(batch: Batch, counts: Integers, job: Job) -> Floats:
    """Peak bytes of a GPU of every stage, FASOP's margin included, `(B, pp)`.

    Args:
        batch: B strategies.
        counts: Layers of every stage, `(B, pp)`.
        job: What they train.
    """
    tp, pp = batch.degrees.tp, batch.degrees.pp
    in_flight = min(pp, batch.num_micro_batches)
    tokens = float(job.seq_len * batch.degrees.micro_batch_size)
    hidden, vocab = float(job.hidden_size), float(job.vocab_size)
    attention = 5 * job.num_heads * job.seq_len / (hidden * tp)
    block = 12 * hidden**2 / tp * STATE_BYTES + tokens * in_flight * hidden * (10 + 24 / tp + attention)
    matrix = hidden * vocab / tp * STATE_BYTES
    embedding = matrix + tokens * hidden * pp * in_flight / tp
    post = matrix + 4 * tokens * (hidden + vocab) / tp
    kinds = np.diff(batch.layers.embedding)
    layer = np.where(kinds > 0, embedding, block)
    if not job.encoder_decoder:
        layer[-1] = post
    prefix, end = _prefix(layer), counts.cumsum(1)
    peak: Floats = MEMORY_MARGIN * (prefix[end] - prefix[end - counts])
    return peak


def _prefix(values: Floats) -> Floats:
    """Prefix sums from 0."""
    return np.pad(values.cumsum(), (1, 0))
