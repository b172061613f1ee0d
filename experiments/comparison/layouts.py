"""Read cuts of a model that are not searched: published layout strings, and Megatron-LM's own rule."""

import re
from collections.abc import Sequence
from itertools import accumulate

from darts_parallel.problem import LayerSpec

SYMBOLS = {"embedding": "E", "mtp": "m", "mtp_again": "m", "head": "L"}
"""Letter of a kind of layer in a layout; blocks of every other kind are `t`."""
UNNAMED = ("loss", "decoder_embedding")
"""Kinds of layers that no layout names."""
OWN = ("1f1b", "interleaved")
"""Schedules of Megatron-LM."""


def chunks_of(layout: str) -> list[str]:
    """Return the symbols of every chunk of a layout, e.g. `Ettt`, `tt`, `m`, `L`.

    Args:
        layout: As Megatron-LM's `--pipeline-model-parallel-layout` takes it: chunks are parted by `|`, `x*3`
            and `(tt|)*3` repeat, commas mean nothing.
    """
    text = layout.replace(",", "")
    for pattern in (r"\(([^()]*)\)\*(\d+)", r"([A-Za-z])\*(\d+)"):
        text = re.sub(pattern, lambda found: found[1] * int(found[2]), text)
    return text.split("|")


def first_layers(chunks: Sequence[str], layers: Sequence[LayerSpec]) -> list[int] | None:
    """Return every chunk's first layer; None where the layout is of another model or leaves a chunk empty.

    Layers that no layout names (the loss, a decoder's embedding) go with the layer before them.
    """
    named = [index for index, layer in enumerate(layers) if layer.kind not in UNNAMED]
    symbols = "".join(SYMBOLS.get(layers[index].kind, "t") for index in named)
    if "".join(chunks) != symbols or not all(chunks):
        return None
    sizes = [len(chunk) for chunk in chunks[:-1]]
    return [named[first] for first in accumulate(sizes, initial=0)]


def megatron_default(blocks: int, stages: int) -> list[str] | None:
    """Return the chunks that Megatron-LM makes without a layout; None where its rules make none.

    Equal numbers of blocks; else with embedding, loss or both counted as a block each
    (`--account-for-embedding-in-pipeline-split`, `--account-for-loss-in-pipeline-split`); else a last stage
    that is shorter than the others (`--decoder-last-pipeline-num-layers`).
    """
    for embedding, loss in ((0, 0), (1, 1), (0, 1), (1, 0)):
        each, rest = divmod(blocks + embedding + loss, stages)
        if not rest and each > max(embedding, loss):
            break
    else:
        embedding = 0
        each = -(-blocks // stages)
        loss = each * stages - blocks
    if loss >= each:
        return None
    first = "E" + "t" * (each - embedding)
    inner = ["t" * each] * (stages - 2)
    last = "t" * (each - loss) + "L"
    return [first, *inner, last]


def default_chunks(layers: Sequence[LayerSpec], stages: int) -> list[str] | None:
    """Apply `megatron_default` to a model; modules of multi-token prediction lie with the loss."""
    kinds = [layer.kind for layer in layers if layer.kind not in UNNAMED]
    blocks = sum(kind not in SYMBOLS for kind in kinds)
    chunks = megatron_default(blocks, stages)
    if chunks is None:
        return None
    depth = sum(SYMBOLS.get(kind) == "m" for kind in kinds)
    chunks[-1] = chunks[-1].replace("L", "m" * depth + "L")
    return chunks
