"""Hand-computed costs of a GPT block: every ZeRO stage x recomputation x sequence parallelism.

The arithmetic stands here, from the papers' formulas, with a block, a device and links of round figures.
"""

from dataclasses import dataclass, replace
from itertools import product
from math import hypot, prod, sqrt

import pytest
import torch

from darts_parallel.cost.cost_table import CostTable
from darts_parallel.cost.table import build_tables
from darts_parallel.plans.space import OuterSpace
from darts_parallel.plans.strategy import LayerStrategy
from darts_parallel.problem.cluster import Cluster, Device, Link, NodeGroup
from darts_parallel.problem.problem import Problem, load_problem

H, HEADS, S, TP, DP, B = 256, 4, 128, 2, 4, 2
"""Hidden size, heads, sequence, degrees and sequences of a micro-batch on a rank."""
T = S * B
PEAK, MEMORY, HALF, OVERHEAD = 5e13, 8e11, 32.0, 7e-6
"""Best FLOP/s of products, bytes/s, side at which a product has half its speed, launch seconds."""
DIVIDED, GAP, START = 48.0, 2e-6, 5e-6
"""Divided side of a weight at which a product loses half again, seconds in which a layer's kernels start and
drain, and in which an all-reduce starts."""
INSIDE, OUT, INSIDE_LATENCY, OUT_LATENCY = 1e11, 2e10, 3e-6, 11e-6
HIDDEN_TP, STREAMING, STATE, ACTIVATION = 0.25, 1.5, 1.125, 1.25
"""Share of tensor parallelism's collectives that is hidden, and factors of a device."""
PARAMETER, GRADIENT, OPTIMIZER = 2.0, 4.0, 12.0
"""Bytes a parameter with bf16 and Adam: float32 gradients, master weights and two moments."""
CASES = list(product((0, 1, 2, 3), ("none", "selective", "full"), (False, True)))


def gpt_block() -> Problem:
    """Build a job of one GPT block on two nodes of four GPUs."""
    problem = load_problem(
        [
            "model=gpt2_xl",
            f"model.hidden_size={H}",
            f"model.num_heads={HEADS}",
            "model.num_layers=1",
            "training=gpt2_xl",
            f"training.seq_len={S}",
            "training.global_batch_size=16",
            "training.attention_kernel=unfused",
            "cluster=a10_8x4",
        ]
    )
    device = Device(
        "round",
        2.0**34,
        peak_flops=PEAK / 0.5,
        memory_bandwidth=MEMORY / 0.8,
        gemm_efficiency=0.5,
        gemm_half_size=HALF,
        attention_efficiency=0.5,
        memory_efficiency=0.8,
        layer_overhead=OVERHEAD,
        overlap_exponent=2.0,
        reserved=0.0,
        divided_half_size=DIVIDED,
        kernel_gap=GAP,
        collective_start=START,
        tp_hidden_share=HIDDEN_TP,
        streaming_factor=STREAMING,
        state_factor=STATE,
        activation_factor=ACTIVATION,
    )
    group = NodeGroup(2, 4, device, Link(INSIDE, INSIDE_LATENCY), None)
    return replace(problem, cluster=Cluster("round", (group,), Link(OUT, OUT_LATENCY)))


@pytest.fixture(scope="module")
def table() -> CostTable:
    choices = tuple(LayerStrategy(TP, DP, zero, again, sp) for zero, again, sp in CASES)
    return build_tables(gpt_block(), [OuterSpace(1, (2,), choices)])[0]


def product_seconds(rows: float, columns: float, inner: float, divided: float) -> float:
    """2 m n k FLOP at the peak less what small sides lose, or its traffic in 16 bits."""
    full = [side / (side + HALF) for side in (rows, columns, inner)]
    full.append(divided / (divided + DIVIDED))
    arithmetic = 2 * rows * columns * inner / (PEAK * prod(full))
    return max(arithmetic, 2 * (rows * columns + rows * inner + columns * inner) / MEMORY)


def exposed(compute: float, communication: float) -> float:
    """Pollux, equation 11, with exponent 2."""
    return sqrt(compute**2 + communication**2) - compute


# four products of a block: (out, in), divided by columns or by rows (Shoeybi et al. 2019)
PRODUCTS = [
    (T, 3 * H / TP, H, 3 * H / TP),
    (T, H, H / TP, H / TP),
    (T, 4 * H / TP, H, 4 * H / TP),
    (T, H, 4 * H / TP, 4 * H / TP),
]
WEIGHTS = sum(product_seconds(*shape) for shape in PRODUCTS)
# 2 s^2 h FLOP twice; the scores are written, pass scale-mask-softmax and dropout, and are read (6 passes)
CORE = 4 * T * S * H / TP / (PEAK * 64 / (64 + HALF)) + 6 * 2 * T * S * HEADS / TP / MEMORY
# 12 h^2 of products, 7 h of biases that are divided; 2 h of biases and 4 h of norms on every rank
NUMBERS = (12 * H**2 + 7 * H) / TP + 6 * H


def ring(size: float, messages: float) -> float:
    """Reduce-scatter or all-gather over the 4 data-parallel ranks, 2 of each node; 4 rings leave a node."""
    inside = size / 2 / INSIDE + messages * INSIDE_LATENCY
    return inside + (size / 2) / 2 * 4 / OUT + messages * OUT_LATENCY


@dataclass(frozen=True)
class Expected:
    """Figures of one strategy, computed by hand."""

    forward: float
    backward: float
    weight_gradient: float
    recompute: float
    tensor_parallel: float
    sharding: float
    gradient_sync: float
    optimizer: float
    static: float
    activation: float
    for_weights: float
    working: float


def expected(zero: int, again: str, sp: bool) -> Expected:
    outside = TP if sp else 1
    # norms read and write (4 h), dropout and residual read two and write one, twice (6 h); GeLU 4 h + 4 h
    streamed = STREAMING * 2 * T * (10 * H / outside + 8 * H / TP) / MEMORY
    # launches run ahead of the kernels in part: the root of both squares
    pass_forward = hypot(WEIGHTS + CORE + streamed, OVERHEAD) + GAP
    # two all-reduces (or pairs of half of one) of the hidden state in each direction over two ranks
    collective = START + 2 * (2 * T * H / 2 / INSIDE + INSIDE_LATENCY)
    shown = (1 - HIDDEN_TP) * 2 * collective
    repeated = {"none": 0.0, "selective": CORE, "full": pass_forward}[again]
    own = NUMBERS / DP if zero >= 2 else NUMBERS
    accumulation = own * (2 * GRADIENT + PARAMETER) / MEMORY
    forward = pass_forward + shown
    backward = 2 * pass_forward + accumulation + repeated + shown * (2 if again == "full" else 1)
    # gradients travel in buckets of 40e6; ZeRO-3 gathers layer by layer
    gather, scatter = (
        ring(width * NUMBERS, 1.0 if zero == 3 else NUMBERS / 40e6)
        for width in (PARAMETER, GRADIENT)
    )
    every_forward = exposed(forward, gather) if zero == 3 else 0.0
    sent = {2: scatter, 3: gather + scatter}.get(zero, 0.0)
    every_backward = exposed(backward, sent) if zero >= 2 else 0.0
    sync = exposed(backward, {0: 2 * scatter, 1: scatter}.get(zero, 0.0))
    sync += exposed(forward, gather) if zero in (1, 2) else 0.0
    updated = NUMBERS / DP if zero else NUMBERS
    # Korthikanti et al.: 10 + 24 / t, 34 / t with sequence parallelism, and 5 a s / h
    scores = T * 5 * HEADS * S / TP
    whole = ACTIVATION * (T * H * (10 / outside + 24 / TP) + scores)
    kept = {"none": whole, "selective": whole - ACTIVATION * scores, "full": 2 * T * H / outside}[
        again
    ]
    # inputs of the products and gradients of their outputs: 24 / t + 8 (Qi et al. 2023, table 1)
    needed = ACTIVATION * T * H * (24 / TP + 8 / outside)
    held = [NUMBERS / (DP if zero >= stage else 1) for stage in (3, 2, 1)]
    gathered = NUMBERS * ((GRADIENT if zero >= 2 else 0) + (PARAMETER if zero == 3 else 0))
    return Expected(
        forward=forward + every_forward,
        backward=backward + every_backward,
        weight_gradient=WEIGHTS + accumulation,
        recompute=repeated,
        tensor_parallel=shown * (3 if again == "full" else 2),
        sharding=every_forward + every_backward,
        gradient_sync=sync,
        # reads and writes states and gradients, and writes the weights
        optimizer=updated * (2 * (OPTIMIZER + GRADIENT) + PARAMETER) / MEMORY,
        static=STATE * (PARAMETER * held[0] + GRADIENT * held[1] + OPTIMIZER * held[2]),
        activation=kept,
        for_weights=max(kept, min(needed, whole)),
        # a layer that is computed again has all of its activations for a moment
        working=whole - kept + gathered,
    )


@pytest.mark.parametrize(("index", "case"), list(enumerate(CASES)))
def test_a_block_costs_what_papers_say(
    table: CostTable, index: int, case: tuple[int, str, bool]
) -> None:
    want, block = expected(*case), 1
    for name in ("forward", "backward", "weight_gradient"):
        assert float(getattr(table, name)[0, 0, block, index]) == pytest.approx(
            getattr(want, name), rel=1e-12
        )
    for name in ("static", "activation", "for_weights", "working"):
        assert float(getattr(table, name)[0, block, index]) == pytest.approx(
            getattr(want, name), rel=1e-12
        )
    for name in ("recompute", "tensor_parallel", "sharding", "gradient_sync", "optimizer"):
        found = float(table.terms[name][0, 0, block, index])
        assert found == pytest.approx(getattr(want, name), rel=1e-12, abs=1e-18), name
    sync = float(table.sync[0, 0, block, index])
    assert sync == pytest.approx(want.gradient_sync + want.optimizer, rel=1e-12)


def test_one_rank_starts_no_collective() -> None:
    alone = build_tables(gpt_block(), [OuterSpace(1, (2,), (LayerStrategy(1, 8),))])[0]
    assert float(alone.terms["tensor_parallel"].abs().max()) == 0.0


def test_muon_orthogonalizes_the_matrices_of_blocks_alone() -> None:
    choices = tuple(LayerStrategy(TP, DP, zero) for zero in (0, 1))
    job, optimizer = gpt_block(), []
    for name in ("muon", "sgd"):  # both keep one moment
        training = replace(job.training, optimizer=name)
        table = build_tables(replace(job, training=training), [OuterSpace(1, (2,), choices)])[0]
        optimizer.append(table.terms["optimizer"][0, 0])
    embedding, block, *others = (optimizer[0] - optimizer[1]).tolist()
    # five iterations of 4 m^2 n + 2 m^3 FLOP on h x 3h, h x h and two of h x 4h
    seconds = 5 * (4 * (3 + 1 + 4 + 4) + 4 * 2) * H**3 / PEAK
    assert block == pytest.approx([seconds, seconds / DP], rel=1e-9)
    assert len(others) > 0
    assert all(other == [0.0, 0.0] for other in (embedding, *others))


def test_parts_that_are_computed_again_take_their_products_and_norms() -> None:
    job, repeated = gpt_block(), {}
    choices = tuple(LayerStrategy(TP, DP, 0, "selective", sp) for sp in (False, True))
    for modules in (("layernorm",), ("mlp",), ("layernorm", "mlp"), ("core_attn", "layernorm")):
        training = replace(job.training, recompute_modules=list(modules))
        table = build_tables(replace(job, training=training), [OuterSpace(1, (2,), choices)])[0]
        repeated[modules] = table.terms["recompute"][0, 0, 1]
    # two norms of 2 h bytes, which sequence parallelism divides, are written as 16-bit elements
    norms = torch.tensor([1.0, 1.0 / TP]) * STREAMING * 2 * T * 2 * 2 * H / MEMORY
    mlp = sum(product_seconds(*shape) for shape in PRODUCTS[2:])
    assert repeated["layernorm",].tolist() == pytest.approx(norms.tolist())
    assert repeated["mlp",].tolist() == pytest.approx([mlp, mlp])
    assert repeated["layernorm", "mlp"].tolist() == pytest.approx((norms + mlp).tolist())
    assert repeated["core_attn", "layernorm"].tolist() == pytest.approx((norms + CORE).tolist())
