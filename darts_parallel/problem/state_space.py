"""State-space layers: sizes, parameters, FLOP, traffic and kept bytes of Mamba-2 and Mamba-1.

Mamba-2 (Dao and Gu 2024, arXiv 2405.21060): one product makes gate, input, B, C and step of all
heads, a short convolution mixes neighbours, and the state-space dual form scans the sequence in
chunks (section 6): inside a chunk by matrix products like attention, between chunks by a small
recurrence. Mamba-1 (Gu and Dao 2023, arXiv 2312.00752; Jamba) has a state for every channel, so
that its scan runs outside matrix units.
"""

from dataclasses import replace

from darts_parallel.config import MAMBA, SYMBOLS, ModelConfig
from darts_parallel.problem.layer_spec import Gemm, LayerSpec, Scan, weights

SELECTIVE_SCAN_FLOP = 9.0
"""FLOP of a channel and state number of Mamba-1: discretization, recurrence, output (the selective
scan's own count in its repository, state-spaces/mamba)."""


def state_space_heads(config: ModelConfig) -> int:
    """Return the heads of the scan; null means two inner channels for every hidden one."""
    if config.mamba_num_heads is not None:
        return config.mamba_num_heads
    return max(2 * config.hidden_size // config.mamba_head_dim, 1)


def tensor_divided(config: ModelConfig) -> tuple[int, ...]:
    """Return numbers that a tensor-parallel degree divides: heads, and groups that share B and C.

    As Megatron-LM's mixer asserts; B and C of Mamba-1 are whole on every rank.
    """
    if config.mamba_dt_rank is not None or config.mamba_short_conv:
        return (_inner_size(config),)
    return state_space_heads(config), config.mamba_num_groups


def state_space(config: ModelConfig) -> LayerSpec:
    """Describe a state-space layer and its residual, the scales of its norm left aside."""
    h = config.hidden_size
    if config.mamba_short_conv:
        layer = _short_convolution(config)
    elif config.mamba_delta_rule:
        layer = _delta_net(config)
    else:
        layer = _mamba_2(config) if config.mamba_dt_rank is None else _mamba_1(config)
    layer = replace(layer, kind=SYMBOLS[MAMBA], output_elements=h, recomputable=True)
    return replace(
        layer,
        replicated_elements=5.0 * h,
        replicated_activation_bytes=(4.0 + config.dropout) * h,
        tp_collectives=1,
        tp_collectives_backward=1,
    )


def _inner_size(config: ModelConfig) -> int:
    return state_space_heads(config) * config.mamba_head_dim


def _mamba_2(config: ModelConfig) -> LayerSpec:
    h = config.hidden_size
    inner = _inner_size(config)
    heads = state_space_heads(config)
    state = config.mamba_state_dim
    chunk = config.mamba_chunk_size
    shared = config.mamba_num_groups * state  # B, and as much C
    mixed = inner + 2 * shared
    projected = inner + mixed + heads
    gemms = (Gemm(projected, h, "column"), Gemm(h, inner, "row"))
    # convolution with bias; A, D and step bias of every head; the gated norm
    normed = inner * config.mamba_inner_norms
    others = mixed * (config.mamba_conv_kernel + 1) + 3 * heads + normed
    scores = 2.0 * chunk * shared
    states = 2.0 * state * inner
    chunk_scores = 2.0 * config.mamba_num_groups * chunk
    chunk_states = 2.0 * inner * state / chunk  # float32
    convolution = 2.0 * mixed
    # chunk states, recurrence between chunks, C B^T
    repeated = (inner + shared + chunk_states) + 2.0 * chunk_states + (2.0 * shared + chunk_scores)
    # input and gate read, two outputs written
    outputs = 4.0 * inner + shared + chunk_scores + chunk_states
    # C B^T and its product with the inputs inside a chunk, chunk states, their output
    flops = scores + 2.0 * chunk * inner + 2.0 * states
    moved = repeated + outputs
    again = convolution + repeated
    side = min(config.mamba_head_dim, state, chunk)
    gathered = float(projected + inner)
    scan = Scan(flops, scores + states, moved, again, side, heads, gathered)
    parameters = weights(gemms) + others + projected * config.linear_bias
    # convolution; gated norm: two reads, one write
    elements = convolution + 3.0 * normed
    # the joint product's output, the scan's output, the last product's input; the fused function of
    # state-spaces/mamba (ops/triton/ssd_combined) computes convolution and chunk states again
    kept = 2.0 * (projected + 2.0 * inner)
    return LayerSpec(
        gemms=gemms,
        scan=scan,
        sharded_parameters=parameters,
        replicated_parameters=h * config.linear_bias,
        sharded_elements=elements,
        sharded_activation_bytes=kept,
    )


def _delta_net(config: ModelConfig) -> LayerSpec:
    """Describe a gated delta net (arXiv 2412.06464, section 3.3), in chunks as flash-linear-attention.

    A chunk inverts a triangular matrix of its keys, whose products with keys and values (W and U) then
    correct the state.
    """
    h = config.hidden_size
    heads = state_space_heads(config)
    size = config.mamba_head_dim
    state = config.mamba_state_dim
    chunk = config.mamba_chunk_size
    inner = heads * size
    wide = heads * state  # keys, repeated for the heads of the values
    mixed = inner + 2 * config.mamba_num_groups * state
    rank = config.mamba_gate_rank
    if rank is None:
        projected = mixed + inner + 2 * heads  # gate; decay and strength of every head
        ins = [Gemm(projected, h, "column")]
        steps = 2 * heads
    else:
        projected = mixed + inner + wide + heads
        ins = [
            Gemm(mixed + heads, h, "column"),
            Gemm(2 * rank, h, "replicated"),
            Gemm(inner + wide, rank, "column"),
        ]
        steps = wide + heads
    gemms = (*ins, Gemm(h, inner, "row"))
    # keys with keys and queries, the inverse with keys and values, scores with values
    scores = 2.0 * chunk * (3.0 * wide + 2.0 * inner) + heads * chunk * chunk / 3.0
    states = 6.0 * state * inner
    chunk_states = 2.0 * inner * state / chunk  # float32
    convolution = 2.0 * mixed
    corrected = 2.0 * (inner + wide)
    moved = mixed + 2.0 * inner + corrected + 3.0 * chunk_states
    again = convolution + corrected + 2.0 * chunk_states
    side = min(size, state, chunk)
    flops = (scores + states, scores + states / 3.0)
    scan = Scan(*flops, moved, again, side, heads, float(projected + inner))
    parameters = weights(gemms) + mixed * config.mamba_conv_kernel + steps
    # the joint product's output, queries, keys and values, the scan's output, the last product's input
    kept = 2.0 * (projected + mixed + 2.0 * inner)
    return LayerSpec(
        gemms=gemms,
        scan=scan,
        sharded_parameters=parameters,
        # the gated norm's scale is that of one head
        replicated_parameters=size,
        sharded_elements=convolution + 3.0 * inner,
        sharded_activation_bytes=kept,
    )


def _short_convolution(config: ModelConfig) -> LayerSpec:
    """Describe a convolution of a few tokens between two gates, which one product makes with its input."""
    h = config.hidden_size
    inner = _inner_size(config)
    gemms = (Gemm(3 * inner, h, "column"), Gemm(h, inner, "row"))
    others = inner * (config.mamba_conv_kernel + 4 * config.linear_bias)
    return LayerSpec(
        gemms=gemms,
        sharded_parameters=weights(gemms) + others,
        replicated_parameters=h * config.linear_bias,
        # two gates of two reads and a write, the convolution in between
        sharded_elements=8.0 * inner,
        # the joint product's output, input and output of the convolution, the last product's input
        sharded_activation_bytes=12.0 * inner,
    )


def _mamba_1(config: ModelConfig) -> LayerSpec:
    h = config.hidden_size
    inner = _inner_size(config)
    state = config.mamba_state_dim
    rank = config.mamba_dt_rank or 0
    low = rank + 2 * state
    normed = low * config.mamba_inner_norms
    ins = (Gemm(2 * inner, h, "column"), Gemm(low, inner, "row"))
    gemms = (*ins, Gemm(inner, rank, "column"), Gemm(h, inner, "row"))
    # convolution with bias; step bias, A and D of every channel
    others = inner * (config.mamba_conv_kernel + 1) + inner + inner * state + inner
    flops = SELECTIVE_SCAN_FLOP * inner * state
    moved = 4.0 * inner + 2.0 * state
    again = 3.0 * inner + 2.0 * state
    scan = Scan(flops, flops, moved, again, 1, inner, float(3 * inner + low))
    divided = weights(gemms) + others + 2 * inner * config.linear_bias
    # norms of step, B and C (Jamba)
    whole = normed + h * config.linear_bias
    elements = 2.0 * inner + 2.0 * normed
    # input and output of convolution, step, gate, scan's output, gated output; step, B and C normed
    kept = 2.0 * 6.0 * inner + 4.0 * low
    return LayerSpec(
        gemms=gemms,
        scan=scan,
        sharded_parameters=divided,
        replicated_parameters=whole,
        sharded_elements=elements,
        sharded_activation_bytes=kept,
    )
