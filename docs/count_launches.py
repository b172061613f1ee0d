"""Count the kernels that a Llama block of transformers launches, eager and compiled.

`python docs/count_launches.py` prints the table of `calibration-notes.md` on any CPU, in a minute. Each
operator of PyTorch that is no view and computes something counts as one kernel. Of a compiled block the
calls in the code that PyTorch generates count. The sizes of the block do not change the counts.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from darts_parallel.report import markdown_table

TOKENS = 512
SIZES = LlamaConfig(
    hidden_size=512,
    intermediate_size=1792,
    num_attention_heads=8,
    num_key_value_heads=2,
    attn_implementation="sdpa",
)
FREE = ("empty", "_unsafe_view", "detach")
"""Operators that launch nothing, next to views."""
LAUNCH = re.compile(
    r"^\s+cpp_fused\w*\(|^\s+extern_kernels\.\w+\(|= torch\.ops\.aten\._scaled[\w.]+\(",
    re.MULTILINE,
)
"""Calls in generated code that are kernels: fused loops, products, attention."""
Parts = Mapping[str, tuple[Callable[..., Any], tuple[Tensor, ...]]]


class Kernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts kernels, and the bytes of their inputs and outputs."""

    count = 0
    moved = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> object:
        """Run an operator and count it."""
        result: object = op(*args, **(kwargs or {}))
        if not op.is_view and not any(word in op.name() for word in FREE):
            self.count += 1
            self.moved += size((args, result))
        return result


def size(tensors: object) -> int:
    """Return the bytes of all tensors in a nested structure."""
    found = (leaf for leaf in tree_leaves(tensors) if isinstance(leaf, Tensor))
    return sum(leaf.numel() * leaf.element_size() for leaf in found)


def parts() -> Parts:
    """Return the block and its element-wise parts with their inputs in 16 bits."""
    block = LlamaDecoderLayer(SIZES, 0).bfloat16()
    angles = LlamaRotaryEmbedding(SIZES)(_numbers(1, TOKENS, 1), torch.arange(TOKENS)[None])
    heads = (SIZES.num_attention_heads, SIZES.num_key_value_heads)
    queries, keys = (_numbers(1, n, TOKENS, SIZES.head_dim) for n in heads)
    state = _numbers(1, TOKENS, SIZES.hidden_size)
    wide = [_numbers(1, TOKENS, SIZES.intermediate_size) for _ in range(2)]
    return {
        "whole block": (lambda x: block(x, position_embeddings=angles), (state,)),
        "RMSNorm": (LlamaRMSNorm(SIZES.hidden_size).bfloat16(), (state,)),
        "rotary": (lambda q, k: apply_rotary_pos_emb(q, k, *angles), (queries, keys)),
        "SwiGLU": (lambda gate, up: ACT2FN["silu"](gate) * up, tuple(wide)),
    }


def _numbers(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.bfloat16, requires_grad=True)


def eager(work: Callable[..., Any], inputs: tuple[Tensor, ...]) -> tuple[Kernels, Kernels, int]:
    """Count the kernels of a forward and a backward pass.

    Returns:
        Both, and the bytes that one kernel would move in forward: inputs and outputs.
    """
    with Kernels() as forward:  # type: ignore[no-untyped-call]
        result = work(*inputs)
    outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    gradients = [torch.ones_like(output) for output in outputs]
    with Kernels() as backward:  # type: ignore[no-untyped-call]
        torch.autograd.backward(outputs, gradients)
    return forward, backward, size((inputs, outputs))


def compiled(work: Callable[..., Any], inputs: tuple[Tensor, ...]) -> list[int]:
    """Count the kernels of a compiled forward and backward pass."""
    own = torch.compile(work)

    def both() -> None:
        outputs = [leaf for leaf in tree_leaves(own(*inputs)) if isinstance(leaf, Tensor)]
        torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])

    _, codes = run_and_get_code(both)
    return [len(LAUNCH.findall(code.partition("def call(")[2])) for code in codes]


def table() -> str:
    """Write the kernels of each part, and the bytes that an eager part moves."""
    rows = []
    for name, (work, inputs) in parts().items():
        forward, backward, least = eager(work, inputs)
        counts = [forward.count, backward.count, *compiled(work, inputs)]
        moved = "" if name == "whole block" else f"{forward.moved / least:.1f}"
        rows.append((name, *map(str, counts), moved))
    passes = ("eager forward", "eager backward", "compiled forward", "compiled backward")
    header = ("part", *passes, "eager bytes forward, of one kernel")
    return "\n".join(markdown_table(header, rows, (0,)))


if __name__ == "__main__":
    print(table())
