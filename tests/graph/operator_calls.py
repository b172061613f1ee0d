"""Calls of torch's functions on small tensors, each with the shapes that its operators' rules may split.

The first dimension is 2: on two ranks its parts have size 1.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from darts_parallel.graph.verify import Made


@dataclass(frozen=True)
class Indices:
    """Whole numbers below a bound."""

    bound: int
    shape: tuple[int, ...]


Shape = tuple[int, ...] | Indices
X = (2, 8, 16)
IMAGE = (2, 4, 8, 8)
HEADS = (2, 4, 8, 16)
Calls = dict[str, tuple[Callable[..., Any], tuple[Shape, ...]]]

ELEMENTWISE: Calls = {
    "add": (torch.add, (X, X)),
    "add of a row": (torch.add, (X, (16,))),
    "add of a column": (torch.add, (X, (8, 1))),
    "add with a factor": (partial(torch.add, alpha=2), (X, X)),
    "add of a number": (lambda x: x + 1, (X,)),
    "sub": (torch.sub, (X, X)),
    "reversed sub": (lambda x: 1 - x, (X,)),
    "mul": (torch.mul, (X, X)),
    "mul of a row": (torch.mul, (X, (1, 16))),
    "square": (lambda x: x * x, (X,)),
    "div": (torch.div, (X, X)),
    "division of a number": (lambda x: 2 / x, (X,)),
    "where": (lambda c, x, y: torch.where(c > 0, x, y), (X, X, (16,))),
    "masked_fill": (lambda x, m: x.masked_fill(m > 0, -1.0), (X, (8, 16))),
    "lerp": (torch.lerp, (X, X, X)),
    "addcmul": (torch.addcmul, (X, X, X)),
    "gelu": (functional.gelu, (X,)),
    "prelu": (functional.prelu, (X, (8,))),
    "round": (torch.round, (X,)),
    "to bool": (lambda x: (x * 1.0).to(torch.bool), (X,)),
    "to int": (lambda x: (x * 3).to(torch.int8), (X,)),
    "to double": (lambda x: (x * 3).double(), (X,)),
    "type of another": (lambda x, y: x.type_as(y), (X, (2, 16))),
    "detach": (lambda x: x * x.detach(), (X,)),
    "full_like": (lambda x: torch.full_like(x, 2.0) + x, (X,)),
    "cross entropy of pairs": (
        lambda x, y: functional.binary_cross_entropy_with_logits(x, y.sigmoid()),
        (X, X),
    ),
    "mean square error": (functional.mse_loss, (X, X)),
}
REDUCTIONS: Calls = {
    "sum": (lambda x: x.sum(1), (X,)),
    "sum of all": (torch.sum, (X,)),
    "sum with its dimension": (lambda x: x.sum(1, keepdim=True), (X,)),
    "product and sum of whole numbers": (
        lambda x, i, j: x * (i.unsqueeze(1) * j).flatten(2).sum(2, keepdim=True),
        (X, Indices(5, (2, 8)), Indices(5, (2, 8, 8))),
    ),
    "sum of truths": (lambda x: (x > 0).sum(1), (X,)),
    "mean": (lambda x: x.mean((0, 2)), (X,)),
    "mean of all": (torch.mean, (X,)),
    "amax": (lambda x: x.amax(1), (X,)),
    "max": (lambda x: x.max(1), (X,)),
    "maximum": (torch.maximum, (X, X)),
    "argmax": (lambda x: x.argmax(1), (X,)),
    "argmax of all": (torch.argmax, (X,)),
    "prod": (lambda x: x.prod(1), (X,)),
    "var": (lambda x: x.var((0, 2), keepdim=True), (X,)),
    "var of all": (torch.var, (X,)),
    "var_mean": (lambda x: torch.var_mean(x, 1), (X,)),
    "logsumexp": (lambda x: x.logsumexp(1), (X,)),
    "all": (lambda x: (x > 0).all(1), (X,)),
    "any": (lambda x: (x > 0).any(), (X,)),
    "norm": (lambda x: x.norm(dim=1), (X,)),
    "norm of all": (torch.norm, (X,)),
    "cosine similarity": (lambda x, y: functional.cosine_similarity(x, y, -1), (X, X)),
    "softmax": (lambda x: x.softmax(1), (X,)),
    "log_softmax": (lambda x: x.log_softmax(-1), (X,)),
    "cumprod": (lambda x: x.cumprod(1), (X,)),
    "cumsum": (lambda x: x.cumsum(1), (X,)),
    "sort": (lambda x: x.sort(1), (X,)),
    "sort of the last dimension": (torch.sort, (X,)),
    "topk": (lambda x: x.topk(2, 1), (X,)),
}
VIEWS: Calls = {
    "join": (lambda x: x.reshape(16, 16), (X,)),
    "join of the last": (lambda x: x.flatten(1), (X,)),
    "part": (lambda x: x.unflatten(-1, (4, 4)), (X,)),
    "other groups": (lambda x: x.view(8, 2, 16), (X,)),
    "groups of two": (lambda x: x.view(4, 4, 4, 4), (X,)),
    "sizes of 1": (lambda x: x.view(1, 2, 8, 1, 16), (X,)),
    "another type": (lambda x: x * (x.detach().view(torch.int32) % 3), (X,)),
    "squeeze": (torch.squeeze, ((2, 1, 16, 1),)),
    "squeeze of parts of size 1": (torch.squeeze, (X,)),
    "squeeze of one": (lambda x: x.squeeze(1), ((2, 1, 16),)),
    "unsqueeze": (lambda x: x.unsqueeze(-1), (X,)),
    "permute": (lambda x: x.permute(2, 0, 1), (X,)),
    "transpose": (lambda x: x.transpose(-1, 0), (X,)),
    "t": (torch.t, ((8, 16),)),
    "expand": (lambda x: x.expand(4, 8, 16), ((1, 8, 16),)),
    "expand in front": (lambda x: x.expand(2, 8, 16), ((8, 16),)),
    "slice": (lambda x: x[:, 2:6], (X,)),
    "slice with a step": (lambda x: x[:, ::2], (X,)),
    "select": (lambda x: x[:, 3], (X,)),
    "split": (lambda x: x.split(4, 1), (X,)),
    "chunk": (lambda x: x.chunk(2, -1), (X,)),
    "unbind": (lambda x: x.unbind(1), (X,)),
    "cat": (lambda x, y: torch.cat([x, y], 1), (X, X)),
    "stack": (lambda x, y: torch.stack([x, y], -1), (X, X)),
    "flip": (lambda x: x.flip(1), (X,)),
    "roll": (lambda x: x.roll((1, 2), (0, 2)), (X,)),
    "roll of all": (lambda x: x.roll(3), (X,)),
    "tril": (torch.tril, ((2, 8, 8),)),
    "triu": (lambda x: x.triu(1), ((8, 8),)),
    "diff": (lambda x: x.diff(dim=1), (X,)),
    "glu": (lambda x: functional.glu(x, 1), (X,)),
    "repeat": (lambda x: x.repeat(2, 1, 1), (X,)),
    "repeat_interleave": (lambda x: x.repeat_interleave(2, 1), (X,)),
    "repeat_interleave of all": (lambda x: x.repeat_interleave(2), (X,)),
    "pad": (lambda x: functional.pad(x, (2, 2)), (X,)),
    "pad of equal size": (lambda x: functional.pad(x, (0, 0, 1, -1)), (X,)),
    "pad with a value": (lambda x: functional.pad(x, (2, 2), value=1.0), (X,)),
    "pad around": (lambda x: functional.pad(x, (2, 2), mode="circular"), (X,)),
    "complex": (
        lambda x, y: torch.view_as_real(torch.view_as_complex(x) * torch.view_as_complex(y)),
        ((2, 8, 4, 2), (1, 8, 4, 2)),
    ),
}
LOOKUPS: Calls = {
    "embedding": (functional.embedding, (Indices(32, (2, 8)), (32, 16))),
    "embedding with a padding": (
        lambda i, w: functional.embedding(i, w, padding_idx=3),
        (Indices(32, (2, 8)), (32, 16)),
    ),
    "embedding by frequency": (
        lambda i, w: functional.embedding(i, w, scale_grad_by_freq=True),
        (Indices(4, (2, 8)), (32, 16)),
    ),
    "index": (lambda x, i: x[i], (X, Indices(2, (8,)))),
    "index of the middle": (lambda x, i: x[:, i], (X, Indices(8, (4, 2)))),
    "index of two": (lambda x, i, j: x[i, j], (X, Indices(2, (8,)), Indices(8, (8,)))),
    "index_select": (lambda x, i: x.index_select(1, i), (X, Indices(8, (4,)))),
    "gather": (lambda x, i: x.gather(1, i), (X, Indices(8, X))),
    "gather of fewer": (lambda x, i: x.gather(1, i), (X, Indices(8, (2, 3, 16)))),
    "scatter": (lambda x, i, s: x.scatter(1, i, s), (X, Indices(8, (2, 1, 16)), (2, 1, 16))),
    "assignment to a slice": (
        lambda x, y: torch.slice_scatter(x, y, 1, 2, 6),
        (X, (2, 4, 16)),
    ),
    "scatter_add": (lambda x, i, s: x.scatter_add(1, i, s), (X, Indices(8, X), X)),
}
PRODUCTS: Calls = {
    "linear": (functional.linear, (X, (8, 16), (8,))),
    "linear of a row": (functional.linear, ((16,), (8, 16), (8,))),
    "matmul of matrices": (torch.matmul, ((4, 8), (8, 16))),
    "matmul of batches": (torch.matmul, ((4, 8, 16), (4, 16, 8))),
    "matmul of one batch": (torch.matmul, ((2, 4, 8, 16), (1, 4, 16, 8))),
    "matmul with a vector": (torch.matmul, (X, (16,))),
    "addmm": (torch.addmm, ((4, 16), (4, 8), (8, 16))),
    "addmm of a row": (torch.addmm, ((16,), (4, 8), (8, 16))),
    "addmm with a factor": (partial(torch.addmm, beta=2), ((16,), (4, 8), (8, 16))),
    "baddbmm": (torch.baddbmm, ((1, 8), (4, 8, 16), (4, 16, 8))),
    "einsum": (partial(torch.einsum, "bij,bjk->bik"), ((4, 8, 16), (4, 16, 8))),
    "einsum of a row": (partial(torch.einsum, "ab,ab->a"), ((4, 8), (4, 8))),
    "einsum of one": (partial(torch.einsum, "bij,bij->bi"), ((4, 8, 16), (4, 1, 16))),
    "einsum of a diagonal": (partial(torch.einsum, "iij->ij"), ((8, 8, 4),)),
    "convolution": (lambda x, w: functional.conv2d(x, w, padding=1), (IMAGE, (8, 4, 3, 3))),
    "convolution without batch": (
        lambda x, w: functional.conv2d(x, w, padding=1),
        ((4, 8, 8), (4, 4, 3, 3)),
    ),
    "convolution of sequences": (functional.conv1d, ((2, 8, 16), (4, 8, 3), (4,))),
    "sequence without batch": (
        lambda x, w: functional.conv1d(x, w, padding=1),
        ((8, 16), (8, 8, 3)),
    ),
    "convolution of groups": (
        lambda x, w: functional.conv2d(x, w, padding=1, groups=4),
        (IMAGE, (8, 1, 3, 3)),
    ),
    "transposed convolution": (
        lambda x, w, b: functional.conv_transpose2d(x, w, b, stride=2),
        (IMAGE, (4, 8, 3, 3), (8,)),
    ),
    "transposed convolution of groups": (
        lambda x, w, b: functional.conv_transpose2d(x, w, b, groups=2),
        (IMAGE, (4, 4, 3, 3), (8,)),
    ),
    "transposed convolution without batch": (
        functional.conv_transpose1d,
        ((4, 8), (4, 8, 3)),
    ),
    "conv_transpose3d": (functional.conv_transpose3d, ((2, 4, 4, 4, 4), (4, 4, 3, 3, 3))),
    "bilinear": (functional.bilinear, ((4, 8), (4, 8), (6, 8, 8))),
}
LAYERS: Calls = {
    "layer_norm": (lambda x, w, b: functional.layer_norm(x, (16,), w, b), (X, (16,), (16,))),
    "layer_norm of two": (lambda x: functional.layer_norm(x, (8, 16)), (X,)),
    "rms_norm": (lambda x, w: functional.rms_norm(x, (16,), w), (X, (16,))),
    "group_norm": (lambda x, w, b: functional.group_norm(x, 4, w, b), ((2, 8, 16), (8,), (8,))),
    "batch_norm": (
        lambda x, m, v: functional.batch_norm(x, m.detach(), v.detach().abs() + 1),
        ((2, 8, 16), (8,), (8,)),
    ),
    "batch_norm of the batch": (
        lambda x: functional.batch_norm(x, None, None, training=True),
        ((4, 8, 16),),
    ),
    "max_pool2d": (lambda x: functional.max_pool2d(x, 3, 1, 1), (IMAGE,)),
    "max_pool2d without batch": (lambda x: functional.max_pool2d(x, 3, 1, 1), ((4, 8, 8),)),
    "avg_pool2d": (lambda x: functional.avg_pool2d(x, 3, 1, 1), (IMAGE,)),
    "avg_pool1d without batch": (lambda x: functional.avg_pool1d(x, 3, 1, 1), ((8, 16),)),
    "adaptive pool": (lambda x: functional.adaptive_avg_pool2d(x, (2, 2)), (IMAGE,)),
    "instance_norm": (functional.instance_norm, (IMAGE,)),
    "pixel_shuffle": (lambda x: functional.pixel_shuffle(x, 2), (IMAGE,)),
    "interpolate": (lambda x: functional.interpolate(x, scale_factor=2), (IMAGE,)),
    "cross_entropy": (functional.cross_entropy, ((16, 8), Indices(8, (16,)))),
    "cross_entropy sum": (
        partial(functional.cross_entropy, reduction="sum"),
        ((16, 8), Indices(8, (16,))),
    ),
    "cross_entropy of ignored rows": (
        partial(functional.cross_entropy, ignore_index=3),
        ((16, 8), Indices(8, (16,))),
    ),
    "cross_entropy of images": (functional.cross_entropy, ((4, 8, 16), Indices(8, (4, 16)))),
    "smoothed cross_entropy": (
        partial(functional.cross_entropy, label_smoothing=0.1),
        ((16, 8), Indices(8, (16,))),
    ),
    "attention": (functional.scaled_dot_product_attention, (HEADS, HEADS, HEADS)),
    "causal attention": (
        partial(functional.scaled_dot_product_attention, is_causal=True),
        (HEADS, HEADS, HEADS),
    ),
    "grouped attention": (
        partial(functional.scaled_dot_product_attention, enable_gqa=True),
        (HEADS, (2, 2, 8, 16), (2, 2, 8, 16)),
    ),
    "attention of one head": (
        functional.scaled_dot_product_attention,
        (HEADS, (2, 1, 8, 16), (2, 1, 8, 16)),
    ),
    "attention with a mask": (
        functional.scaled_dot_product_attention,
        (HEADS, HEADS, HEADS, (8, 8)),
    ),
    "attention with masks": (
        functional.scaled_dot_product_attention,
        (HEADS, HEADS, HEADS, (2, 1, 8, 8)),
    ),
    "attention of one sequence": (
        functional.scaled_dot_product_attention,
        ((8, 16), (8, 16), (8, 16)),
    ),
    "attention without batch": (
        functional.scaled_dot_product_attention,
        ((4, 8, 16), (4, 8, 16), (4, 8, 16)),
    ),
}
ATEN = torch.ops.aten
VECTOR = (8,)
OVERLOADS: Calls = {
    "and": (lambda x, y: ATEN.__and__((x > 0), (y > 0)), (X, X)),
    "or of a number": (lambda x: ATEN.__or__((x > 0), True), (X,)),
    "xor": (lambda x, y: ATEN.__xor__((x > 0), (y > 0)), (X, X)),
    "where else a number": (lambda x, y: torch.where(x > 0, y, 0.0), (X, X)),
    "where a number": (lambda x, y: torch.where(x > 0, 0.0, y), (X, X)),
    "where two numbers": (lambda x: torch.where(x > 0, 0.0, 1.0) * x, (X,)),
    "_softmax": (lambda x: ATEN._softmax(x, 1, False), (X,)),
    "_log_softmax": (lambda x: ATEN._log_softmax(x, 1, False), (X,)),
    "_unsafe_view": (lambda x: ATEN._unsafe_view(x, [16, 16]), (X,)),
    "adaptive_avg_pool1d": (lambda x: ATEN.adaptive_avg_pool1d(x, [2]), (X,)),
    "alias": (lambda x: ATEN.alias(x), (X,)),
    "all of all": (lambda x: ATEN.all(x > 0), (X,)),
    "all of two": (lambda x: ATEN.all.dims(x > 0, [0, 1]), (X,)),
    "amin": (lambda x: ATEN.amin(x, [1]), (X,)),
    "any of one": (lambda x: ATEN.any(x > 0, 1), (X,)),
    "any of two": (lambda x: ATEN.any.dims(x > 0, [0, 1]), (X,)),
    "argmin": (lambda x: ATEN.argmin(x, 1), (X,)),
    "batch_norm with statistics": (
        lambda x, m, v: functional.batch_norm(x, m.detach(), v.detach().abs() + 1),
        ((2, 8, 4, 4), VECTOR, VECTOR),
    ),
    "bmm": (torch.bmm, ((4, 8, 16), (4, 16, 8))),
    "clone": (torch.clone, (X,)),
    "constant_pad_nd": (lambda x: ATEN.constant_pad_nd(x, [0, 0, 1, -1]), (X,)),
    "contiguous": (lambda x: ATEN.contiguous(x), (X,)),
    "conv1d padded alike": (lambda x, w: ATEN.conv1d.padding(x, w, None), (X, (4, 8, 3))),
    "conv2d padded alike": (
        lambda x, w: functional.conv2d(x, w, padding="same"),
        (IMAGE, (8, 4, 3, 3)),
    ),
    "conv3d": (functional.conv3d, ((2, 4, 4, 4, 4), (4, 4, 3, 3, 3))),
    "conv3d padded alike": (
        lambda x, w: functional.conv3d(x, w, padding="same"),
        ((2, 4, 4, 4, 4), (4, 4, 3, 3, 3)),
    ),
    "dropout in evaluation": (lambda x: ATEN.dropout(x, 0.5, False), (X,)),
    "empty_like": (lambda x: torch.where(x == x, x, ATEN.empty_like(x)), (X,)),
    "ones_like": (lambda x: ATEN.ones_like(x) * x, (X,)),
    "zeros_like": (lambda x: ATEN.zeros_like(x) + x, (X,)),
    "logcumsumexp": (lambda x: x.logcumsumexp(1), (X,)),
    "masked_fill of a tensor": (
        lambda x, v: x.masked_fill(x > 0, v.sum()),
        (X, (1,)),
    ),
    "max of all": (torch.max, (X,)),
    "min of all": (torch.min, (X,)),
    "min": (lambda x: x.min(1), (X,)),
    "max_pool1d": (lambda x: functional.max_pool1d(x, 2), (X,)),
    "max_pool2d_with_indices": (
        lambda x: functional.max_pool2d(x, 2, return_indices=True),
        (IMAGE,),
    ),
    "mm": (torch.mm, ((4, 8), (8, 16))),
    "native_layer_norm": (
        lambda x, w, b: ATEN.native_layer_norm(x, [16], w, b, 1e-5),
        (X, (16,), (16,)),
    ),
    "polar": (lambda x, y: torch.view_as_real(torch.polar(x.abs(), y)), (X, X)),
    "prod of all": (torch.prod, ((2, 4),)),
    "scatter of a number": (lambda x, i: x.scatter(1, i, 3.0), (X, Indices(8, (2, 1, 16)))),
    "scatter that adds": (
        lambda x, i, s: x * x.detach().scatter(1, i, s.detach(), reduce="add"),
        (X, Indices(8, (2, 1, 16)), (2, 1, 16)),
    ),
    "scatter that multiplies": (
        lambda x, i: x * x.detach().scatter(1, i, 3.0, reduce="multiply"),
        (X, Indices(8, (2, 1, 16))),
    ),
    "stable sort": (lambda x: torch.sort(x, dim=1, stable=True), (X,)),
    "split in sizes": (lambda x: x.split([2, 6], 1), (X,)),
    "squeeze of two": (lambda x: ATEN.squeeze.dims(x, [1, 3]), ((2, 1, 16, 1),)),
    "std": (lambda x: x.std(1), (X,)),
    "std of all": (lambda x: ATEN.std(x), (X,)),
    "std of one": (lambda x: ATEN.std.dim(x, [1]), (X,)),
    "var of one": (lambda x: ATEN.var.dim(x, [1]), (X,)),
    "var_mean of all": (lambda x: ATEN.var_mean(x), (X,)),
    "var_mean of one": (lambda x: ATEN.var_mean.correction(x, [1], correction=1), (X,)),
    "bilinear upsampling": (
        lambda x: functional.interpolate(x, scale_factor=2, mode="bilinear"),
        (IMAGE,),
    ),
    "mask of infinities": (lambda x: x.masked_fill(x > 0, float("-inf")), (X,)),
    "upsample_nearest2d": (lambda x: ATEN.upsample_nearest2d(x, [16, 16]), (IMAGE,)),
    "upsample_bilinear2d": (
        lambda x: ATEN.upsample_bilinear2d(x, [16, 16], False),
        (IMAGE,),
    ),
}
CALLS: Calls = ELEMENTWISE | REDUCTIONS | VIEWS | LOOKUPS | PRODUCTS | LAYERS | OVERLOADS
UNSEEN = {
    "_grouped_mm.default",
    "grouped_mm.default",
    "grouped_mm_fallback.default",
}
"""Overloads of rules that no call has: their modules are in `test_running`."""


class Called(nn.Module):
    """A module that calls one function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *given: Tensor) -> Any:
        return self.function(*given)


def made(name: str) -> Made:
    """Return a call as a module with its inputs."""
    function, shapes = CALLS[name]
    generator = torch.Generator().manual_seed(3)
    inputs = []
    for shape in shapes:
        if isinstance(shape, Indices):
            drawn = torch.randint(0, shape.bound, shape.shape, generator=generator)
        else:
            drawn = torch.randn(shape, generator=generator)
        inputs.append(drawn)
    return Called(function), inputs
