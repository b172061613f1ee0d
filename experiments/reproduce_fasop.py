"""Are FASOP's plans reproduced, and improved under its own costs?

    python -m experiments.reproduce_fasop                    its 12 cases: BERT, GPT2-XL, T5
    python -m experiments.reproduce_fasop profiles=FOLDER

Computes what FASOP's published program (HPDC'24) computes; where the program departs from physics a docstring
says so. `profiles` holds layer_forward_seconds.csv and micro_batch_multipliers.csv; without it FASOP's own
measurements are read. "ours" moves single layers of its best strategies between stages as long as its
simulated step falls. A second table switches the sharing of bandwidth off. Bandwidths are in
bit/s, all else in SI units.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import groupby, product
from math import inf
from typing import NamedTuple

import numpy as np

from baselines.fasop import TICK, middle_comm, minmax_partition, ticks_of
from darts_parallel.config import read_yaml, run_main
from darts_parallel.cost import Array, Index
from darts_parallel.errors import ConfigError, Entries, InfeasibleError
from darts_parallel.plans import divisors
from darts_parallel.problem import Profiles, read_profiles
from darts_parallel.report import markdown_table
from experiments.data import DATA
from experiments.study import Study, StudyOptions, report_text, run_study

SHIPPED = DATA / "fasop"
SHORTLIST = 6
"""Number of FASOP's best strategies whose partitions are refined."""
FASOP, OURS = "fasop", "ours"
"""Planners of the rows."""
HEADER = (
    "case",
    "plan of",
    "tp,dp,pp,micro-batch",
    "layers per stage",
    "nodes",
    "s/step",
    "published",
    "CPU s",
    "CPU s of FASOP's program",
)
MAX_TP = 4
"""Largest tensor-parallel degree that FASOP has measured."""
BITS = 16
"""Bits of an element that is sent."""
BETWEEN_SLOWDOWN = 1.05
"""Divisor of the bandwidth of a send between nodes; fitted by FASOP's authors."""
INSIDE_SLOWDOWN = 3.5
"""Divisor of the bandwidth of a send inside a node; fitted by FASOP's authors."""
BIAS_PARAMETERS = 20800
"""Parameters of a layer next to the 12 hidden^2 of its matrices, equal for all models."""
STATE_BYTES = 18
"""Bytes of a parameter with its gradient and optimizer state."""
MEMORY_MARGIN = 1.10
"""Factor on FASOP's memory estimate, as its program has it."""
ROUNDING = 1e-9
"""Relative gain of a move that is rounding."""
NOT_SHARED = "fasop, sharing off"
"""Planner that chooses as FASOP does, but with all-reduces that have links for themselves."""


PARTITION = (
    "FASOP's log of GPT2-XL on Hetero-large begins with layers 5 4 3 3 2 3 3 ... and the A100 node first, "
    "in 1.0596 s (`FASOP/main_logs/gpt2_heterogeneous.csv`, commit 4a35d97 of AvatarHwang/FASOP). Its "
    "program of commit 93cb38b, which is computed here, prices that plan at 1.0691 s. It prints the plan "
    "above, with the A100 node last, which takes 0.08 % less. In the log the all-reduce of that plan takes "
    "twice as long, as if A100 nodes shared their bandwidth, and its pipeline takes 1.1 % less."
)
"""Why a published partition of GPT2-XL is not the one that FASOP's program prints."""
SHARING = (
    "What sharing changes: seconds of the all-reduces of FASOP's plan where the groups of a node share its "
    "bandwidth, and where each has the links for itself. Then the plan that FASOP chooses with sharing off, "
    "and how much longer its step takes with sharing on. FASOP's paper reports errors of its all-reduces of "
    "0.24 to 11.5 % with sharing and 52 to 379 % without. Its repository has no measured all-reduces."
)


class FasopDegrees(NamedTuple):
    """Degrees of a strategy; ties of seconds go to the smallest, in this order."""

    micro_batch_size: int
    tp: int
    dp: int
    pp: int


@dataclass(frozen=True)
class FasopNode:
    """A type of node: bit/s out of it and inside it, and bytes of a GPU that a plan may fill."""

    name: str
    device: str
    """GPU, as the profile names it, or the part before a bracket."""
    inter_bandwidth: float
    intra_bandwidth: float
    memory: float
    shares_bus: bool = False
    """Whether data-parallel groups inside a node share its bandwidth (PCIe)."""


@dataclass(frozen=True)
class FasopJob:
    """The model, by its name in the profile, and what one step trains on."""

    model: str
    hidden_size: int
    seq_len: int
    vocab_size: int
    num_heads: int
    global_batch_size: int
    num_blocks: int
    """Layers of the chain but the embedding and what follows the last block, or the second embedding."""
    encoder_decoder: bool = False
    """Whether two equal halves of the chain, each behind its embedding, are partitioned apart (T5)."""


@dataclass(frozen=True)
class FasopPlan:
    """A strategy with its placement and partition."""

    case: str
    planner: str
    tp: int
    dp: int
    pp: int
    micro_batch_size: int
    layers_per_stage: tuple[int, ...]
    nodes: tuple[str, ...]
    """Types in pipeline order."""
    s_per_step: float
    """Seconds of one step; infinite where the program's memory estimate exceeds a GPU."""
    sync_s: float
    """Seconds of the slowest all-reduce of gradients and tied embedding."""
    alone_s_per_step: float
    """Seconds of one step where no two all-reduces share a link; the program has no such switch."""
    alone_sync_s: float
    """Seconds of the slowest of those all-reduces."""
    cpu_s: float = 0.0
    """CPU seconds of the search that found the plan."""


@dataclass(frozen=True)
class FasopCase:
    """A job on a cluster of `counts` nodes of every type, the fastest type first, with measured layers."""

    name: str
    job: FasopJob
    types: tuple[FasopNode, ...]
    counts: tuple[int, ...]
    gpus_per_node: int
    profiles: Profiles

    def ticks(self, tp: int, micro_batch_size: int) -> Index:
        """Return prefix sums of the layers' forward and backward ticks by node type, `(types, L + 1)`."""
        model = self.job.model
        layers = self.job.num_blocks + 2
        rows = []
        for node in self.types:
            chain = self.profiles.find(model, node.device, tp)
            if len(chain.kinds) != layers:
                raise ConfigError(
                    f"{self.profiles.path}: model {model} on {chain.gpu} has {len(chain.kinds)} layers at "
                    f"tp={tp}, which must be {layers}; try {layers}."
                )
            # the program prices both embeddings by the encoder's
            kinds = [kind.replace("decoder_emb", "encoder_emb") for kind in chain.kinds]
            factor = [
                self.profiles.multiplier(model, chain.gpu, kind, micro_batch_size) for kind in kinds
            ]
            seconds = 3.0 * np.array(chain.forward_s) * np.array(factor)
            rows.append(ticks_of(seconds).cumsum())
        return np.pad(np.stack(rows), ((0, 0), (1, 0)))

    @cached_property
    def has_vocabulary(self) -> Index:
        """Return 1 for every layer with a vocabulary matrix, else 0, `(L,)`."""
        result = np.zeros(self.job.num_blocks + 2, dtype=np.int64)
        result[[0, len(result) // 2 if self.job.encoder_decoder else -1]] = 1
        return result

    def strategies(self) -> Iterator["Strategies"]:
        """Yield all strategies that FASOP tries, those of equal degrees together.

        `tp` divides the GPUs of a node, at most `MAX_TP`; `tp * dp * pp` is the number of GPUs; `dp` divides
        the global batch and the micro-batch its share; no more stages than blocks. Placements are the
        rotations of the nodes sorted by type.
        """
        nodes = np.repeat(np.arange(len(self.counts)), self.counts)
        batch = self.job.global_batch_size
        shifts = len(nodes) if np.count_nonzero(self.counts) > 1 else 1
        placements = np.stack([np.roll(nodes, -shift) for shift in range(shifts)])
        gpus = self.gpus_per_node * len(nodes)
        found = []
        for tp, dp in product(divisors(min(self.gpus_per_node, MAX_TP)), divisors(gpus)):
            pp = gpus // (tp * dp)
            if tp * dp * pp == gpus and batch % dp == 0 and pp <= self.job.num_blocks:
                found += [FasopDegrees(size, tp, dp, pp) for size in divisors(batch // dp)]
        for degrees in sorted(found):
            ticks = self.ticks(degrees.tp, degrees.micro_batch_size)
            yield Strategies(self, degrees, placements, ticks)


class Strategies:
    """Strategies of equal degrees, one for each of B placements, still without their partition.

    Args:
        degrees: Micro-batch size, tp, dp and pp.
        placements: Type of every node in pipeline order, `(B, nodes)`.
        ticks: As `FasopCase.ticks` returns them.
    """

    def __init__(
        self,
        case: FasopCase,
        degrees: FasopDegrees,
        placements: Index,
        ticks: Index,
    ) -> None:
        self.case = case
        self.degrees = degrees
        self.placements = placements
        self.ticks = ticks
        self.size, self.tp, self.dp, self.pp = degrees
        self.num_micro_batches = case.job.global_batch_size // (self.dp * self.size)
        edges = np.arange(self.pp + 1) * self.tp * self.dp
        first = edges[:-1] // case.gpus_per_node
        last = (edges[1:] - 1) // case.gpus_per_node
        # a stage on several types counts as the last, the slowest, of them
        spans = [placements[:, a : b + 1].max(1) for a, b in zip(first, last, strict=True)]
        self.stage_type = np.stack(spans, axis=1)
        self.p2p = self._p2p()

    def _link(self, here: Index, there: Index) -> Array:
        """Return bit/s between pairs of nodes `(...)`, `(B, ...)`."""
        types = self.case.types
        inter = np.array([node.inter_bandwidth for node in types])[self.placements]
        intra = np.array([node.intra_bandwidth for node in types])[self.placements]
        return np.where(here == there, intra[:, here], np.minimum(inter[:, here], inter[:, there]))

    def _p2p(self) -> Array:
        """Return seconds of sending activations over every boundary, `(B, pp - 1)`; not divided by tp."""
        case = self.case
        stage = self.tp * self.dp
        rank = np.arange(self.pp - 1)[:, None] * stage + self.tp * np.arange(self.dp)
        here = rank // case.gpus_per_node
        there = (rank + stage) // case.gpus_per_node
        slowdown = np.where(here == there, INSIDE_SLOWDOWN, stage * BETWEEN_SLOWDOWN)
        bandwidth = self._link(here, there) / slowdown
        bits = self.size * case.job.seq_len * case.job.hidden_size * BITS
        return (bits / bandwidth).max(2)

    def sync_seconds(self, counts: Index, *, shared: bool = True) -> Array:
        """Return seconds of the all-reduce of gradients and tied embedding of every stage, `(B, pp)`.

        With `shared` the groups of a node share its bandwidth, as in the program. It takes the parameters
        of stage 0 and its ring, that of the last tp rank, for all stages; the
        vocabulary matrix counts once, and is not divided by tp. The last dp rank sums the embedding.
        """
        case = self.case
        tp = self.tp
        dp = self.dp
        per_node = case.gpus_per_node
        job = case.job
        here = (tp * np.arange(dp) + tp - 1) // per_node
        bandwidth = self._link(here, np.roll(here, -1)).min(1, keepdims=True)
        share = np.full(counts.shape, float(tp if tp * dp >= per_node else 1))
        if not shared:
            share = np.ones(counts.shape)
        elif tp * dp < per_node and tp > 1:
            on_bus = np.array([node.shares_bus for node in case.types])[self.stage_type]
            share = np.where(on_bus, per_node / dp, 1.0)
        matrix = job.hidden_size * job.vocab_size
        first_stage = counts[:, :1]
        matrices = case.has_vocabulary.cumsum()[first_stage - 1]
        block = 12 * job.hidden_size**2 + BIAS_PARAMETERS
        blocks = (first_stage - matrices) * block / tp
        parameters = blocks + np.where(matrices > 0, matrix, 0)
        ring = 2 * (dp - 1) / dp * BITS * share / bandwidth * parameters
        if self.pp == 1 or job.encoder_decoder:
            return ring
        first = np.array([tp * (dp - 1)])
        last = first + tp * dp * (self.pp - 1)
        bandwidth = self._link(first // per_node, last // per_node)
        sharing = min(dp, per_node) if shared else 1
        return ring + matrix * BITS * sharing / bandwidth / tp

    def memory_bytes(self, counts: Index) -> Array:
        """Return peak bytes of a GPU of every stage, FASOP's margin included, `(B, pp)`."""
        tp = self.tp
        job = self.case.job
        in_flight = min(self.pp, self.num_micro_batches)
        tokens = float(job.seq_len * self.size)
        hidden = float(job.hidden_size)
        vocab = float(job.vocab_size)
        attention = 5 * job.num_heads * job.seq_len / (hidden * tp)
        activations = tokens * in_flight * hidden
        block = 12 * hidden**2 / tp * STATE_BYTES + activations * (10 + 24 / tp + attention)
        matrix = hidden * vocab / tp * STATE_BYTES
        embedding = matrix + activations * self.pp / tp
        layer = np.where(self.case.has_vocabulary > 0, embedding, block)
        if not job.encoder_decoder:
            layer[-1] = matrix + 4 * tokens * (hidden + vocab) / tp
        prefix = np.pad(layer.cumsum(), (1, 0))
        end = counts.cumsum(1)
        return MEMORY_MARGIN * (prefix[end] - prefix[end - counts])

    def pipeline_ends(self, counts: Index) -> Array:
        """Return when every stage has ended its micro-batches, seconds `(B, pp)`."""
        end = counts.cumsum(1)
        before = self.ticks[self.stage_type, end - counts]
        seconds = (self.ticks[self.stage_type, end] - before) * TICK
        count = self.num_micro_batches
        if self.pp == 1:
            return seconds * count
        send = self.p2p[:, 0]
        send_back = self.p2p[:, -1]
        return stage_ends(seconds.T, send, send_back, count).T

    def plans(self, counts: Index, timed: Index | None = None) -> list[FasopPlan]:
        """Return partitions `(B, pp)` as plans; `timed` is what stages are timed by, if not `counts`."""
        ends = self.pipeline_ends(counts if timed is None else timed)
        memory = np.array([node.memory for node in self.case.types])[self.stage_type]
        fits = (self.memory_bytes(counts) <= memory).all(1)
        columns = []
        for shared in (True, False):
            syncs = self.sync_seconds(counts, shared=shared)
            seconds = np.where(fits, (ends + syncs).max(1), np.inf)
            columns += [seconds.tolist(), syncs.max(1).tolist()]
        degrees = (self.tp, self.dp, self.pp, self.size)
        plans = []
        for layers, place, *times in zip(counts.tolist(), self.placements, *columns, strict=True):
            nodes = tuple(self.case.types[kind].name for kind in place)
            plans.append(FasopPlan(self.case.name, FASOP, *degrees, tuple(layers), nodes, *times))
        return plans

    def solved(self) -> list[FasopPlan]:
        """Return every placement with FASOP's partition and the seconds that its program prints."""
        if self.case.job.encoder_decoder and self.pp > 1:
            return self.plans(self._encoder_decoder())
        return self.plans(*minmax_partition(self.ticks, self.stage_type, middle_comm(self.p2p)))

    def _encoder_decoder(self) -> Index:
        """Return the best split of the stages between encoder and decoder, by the end of the pipeline alone.

        Both halves are partitioned with the costs and boundaries of the encoder, and timed with their own.
        """
        half = self.ticks.shape[1] // 2
        stages = self.pp

        def part(kinds: Index) -> Index:
            comm = middle_comm(self.p2p[:, : kinds.shape[1] - 1])
            return minmax_partition(self.ticks[:, : half + 1], kinds, comm)[0]

        splits = range(max(1, stages - (half - 1)), min(stages, half))
        options = []
        for encoder in splits:
            halves = (self.stage_type[:, :encoder], self.stage_type[:, encoder:])
            options.append(np.hstack([part(kinds) for kinds in halves]))
        ends = np.stack([self.pipeline_ends(counts)[:, 0] for counts in options])
        return np.stack(options)[ends.argmin(0), np.arange(len(self.placements))]

    def refined(self, plan: FasopPlan) -> FasopPlan:
        """Return a plan of these degrees after the best moves of single layers between stages."""
        names = [node.name for node in self.case.types]
        place = [names.index(name) for name in plan.nodes]
        one = np.eye(self.pp, dtype=np.int64)
        # a move of a stage to itself changes nothing
        moves = (one[None] - one[:, None]).reshape(-1, len(one))
        while True:
            tried = np.array(plan.layers_per_stage) + moves
            legal = (tried > 0).all(1)
            if self.case.job.encoder_decoder and self.pp > 1:
                legal &= (tried.cumsum(1) == self.ticks.shape[1] // 2).any(1)
            tried = tried[legal]
            every = Strategies(self.case, self.degrees, np.tile(place, (len(tried), 1)), self.ticks)
            best = min(every.plans(tried), key=lambda p: p.s_per_step)
            if best.s_per_step >= plan.s_per_step * (1 - ROUNDING):
                return replace(plan, planner=OURS)
            plan = best


def stage_ends(
    seconds: Array,
    send: Array,
    send_back: Array,
    count: int,
) -> Array:
    """Return when every stage has ended its last backward pass under FASOP's 1F1B, seconds `(pp, B)`.

    Forward is a third of a stage's seconds. Stage i warms up with `min(pp - i - 1, m)` forwards. A send ends
    at the later of "computed" and "peer ready to receive", plus its seconds, and blocks the sender. As in the
    program, sends cost only from the first stage forward and from the last backward, and a steady forward
    send waits for no peer.

    Args:
        seconds: Forward and backward of a micro-batch, `(pp, B)`, pp at least 2.
        send, send_back: Seconds from stage 0 to stage 1, and from the last stage to the one before, `(B,)`.
    """
    last = len(seconds) - 1
    start = np.zeros(seconds.shape[1])
    warm = [min(last - i, count) for i in range(last + 1)]

    @cache
    def forward(i: int, j: int) -> Array:
        free = returned(i, j - warm[i] - 1) if j > warm[i] else sent(i, j - 1)
        return np.maximum(sent(i - 1, j), free) + seconds[i] / 3

    @cache
    def sent(i: int, j: int) -> Array:
        if i < 0 or j < 0:
            return start
        peer = forward(i + 1, j - 1) if 1 <= j < min(warm[i], warm[i + 1]) else start
        return np.maximum(forward(i, j), peer) + (0.0 if i else send)

    @cache
    def backward(i: int, j: int) -> Array:
        free = forward(i, j + warm[i]) if j < count - warm[i] else returned(i, j - 1)
        return np.maximum(free, returned(i + 1, j)) + 2 * seconds[i] / 3

    @cache
    def returned(i: int, j: int) -> Array:
        if i > last or j < 0:
            return start
        if i == 0:
            return backward(0, j)
        ready = j + warm[i - 1]
        if ready < count:
            peer = forward(i - 1, ready)
        elif j:
            peer = backward(i - 1, j - 1)
        else:
            peer = start
        return np.maximum(backward(i, j), peer) + (0.0 if i < last else send_back)

    for micro_batch in range(count):  # in order, so that no call is nested deeply
        ends = [backward(i, micro_batch) for i in range(last + 1)]
    return np.stack(ends)


@dataclass
class FasopOptions(StudyOptions):
    """Command line of `python -m experiments.reproduce_fasop`."""

    jobs: int = 1
    profiles: str = str(SHIPPED)
    """Folder with measured layer times."""


@cache
def read_facts() -> Entries:
    """Read FASOP's nodes, jobs and clusters, and by case what its authors and its own program say."""
    return read_yaml(SHIPPED / "cases.yaml")


def read_cases(profiles: str) -> dict[str, FasopCase]:
    """Return the cases by name."""
    facts = read_facts()
    measured = read_profiles(profiles)
    types = tuple(FasopNode(**node) for node in facts["nodes"])
    gpus = facts["gpus_per_node"]
    found = {}
    for model, fields in facts["jobs"].items():
        job = FasopJob(**fields)
        for cluster, counts in facts["clusters"].items():
            name = f"{model}, {cluster}"
            found[name] = FasopCase(name, job, types, counts, gpus, measured)
    return found


def solve(case: FasopCase) -> list[FasopPlan]:
    """Return FASOP's plan of a case, the refined one, and FASOP's without shared bandwidth.

    Errors:
        InfeasibleError: no plan fits.
    """
    began = time.process_time()
    every = [(plan, strategies) for strategies in case.strategies() for plan in strategies.solved()]
    leading = sorted(every, key=lambda pair: pair[0].s_per_step)[:SHORTLIST]
    theirs = leading[0][0]
    if theirs.s_per_step == inf:
        raise InfeasibleError(f"{case.name}: no plan fits the memory of its GPUs; try more nodes.")
    theirs = replace(theirs, cpu_s=time.process_time() - began)
    refined = (strategies.refined(plan) for plan, strategies in leading)
    ours = min(refined, key=lambda plan: plan.s_per_step)
    ours = replace(ours, cpu_s=time.process_time() - began)
    blind = min((plan for plan, _ in every), key=lambda plan: plan.alone_s_per_step)
    return [theirs, ours, replace(blind, planner=NOT_SHARED)]


def report(plans: Sequence[FasopPlan]) -> str:
    """Return both plans of every case next to the published seconds, and what sharing changes."""
    facts = read_facts()
    lines = []
    entries: dict[str, dict[str, FasopPlan]] = {}
    for plan in plans:
        entries.setdefault(plan.case, {})[plan.planner] = plan
        if plan.planner == NOT_SHARED:
            continue
        layers = " ".join(map(str, plan.layers_per_stage))
        nodes = ", ".join(f"{len(list(run))} {name}" for name, run in groupby(plan.nodes))
        published = cpu = ""
        if plan.planner == FASOP:
            published = str(facts["published"].get(plan.case, {}).get("seconds", ""))
            cpu = str(facts["program_cpu_s"].get(plan.case, ""))
        seconds = (f"{plan.s_per_step:.4f}", published, f"{plan.cpu_s:.1f}", cpu)
        lines.append((plan.case, plan.planner, _degrees(plan), layers, nodes, *seconds))
    ratios = [entry[OURS].s_per_step / entry[FASOP].s_per_step for entry in entries.values()]
    gains = [100 - 100 * ratio for ratio in ratios]
    verdict = f"Ours takes {abs(min(gains)):.1f} to {max(gains):.1f} % less time."
    table = markdown_table(HEADER, lines, range(5))
    return report_text(table, verdict, PARTITION, SHARING, _sharing(entries))


def _degrees(plan: FasopPlan) -> str:
    return f"{plan.tp},{plan.dp},{plan.pp},{plan.micro_batch_size}"


def _sharing(entries: dict[str, dict[str, FasopPlan]]) -> list[str]:
    """Return what shared bandwidth does to the all-reduces and to the choice of a plan."""
    lines = []
    for case, plans in entries.items():
        plan = plans[FASOP]
        blind = plans[NOT_SHARED]
        longer = 100 * (plan.sync_s / plan.alone_sync_s - 1) if plan.alone_sync_s else 0.0
        loss = 100 * (blind.s_per_step / plan.s_per_step - 1)
        shared = (f"{plan.sync_s:.4f}", f"{plan.alone_sync_s:.4f}", f"{longer:.0f} %")
        lines.append((case, *shared, _degrees(blind), f"{loss:.2f} %"))
    header = ("case", "shared", "alone", "longer by", "plan chosen with sharing off", "slower by")
    return markdown_table(header, lines, (0, 4))


def run(options: FasopOptions) -> int:
    """Solve every case; returns the exit status."""
    study = Study(
        "reproduce_fasop",
        "Are FASOP's plans reproduced, and improved under its own costs?",
        "other jobs and clusters, or how far either plan's seconds are from measured ones.",
        solve,
        report,
    )
    return run_study(study, read_cases(options.profiles), options)


if __name__ == "__main__":
    raise SystemExit(run_main("experiments.reproduce_fasop", run))
