"""Sliding windows as Hugging Face files say them: a size, and which layers have it."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from darts_parallel.config.huggingface_architectures import Reader


def windows(
    r: "Reader",
    *,
    key: str = "sliding_window",
    every: int | None = None,
    global_first: bool = False,
    only_if: str | None = None,
    first: str | None = None,
) -> dict[str, Any]:
    """Fields of `ModelConfig` for the windows of a file; none where all layers attend globally.

    `layer_types`, where the file has it, says which layers are windows; else the rule of the class does.

    Args:
        key: Of the window's size in tokens.
        every: One in so many layers is global, the last of them; None: none is.
        global_first: The first of them is global instead.
        only_if: A flag without which there are no windows.
        first: Key of the first layer with a window.
    """
    size = r.optional(key)
    if size is None or (only_if is not None and not r.flag(only_if)):
        return {}
    count, kinds = r.integer("num_hidden_layers"), r.words("layer_types")
    if kinds is not None:
        flags = [int("sliding" in kind) for kind in kinds[:count]]
        flags += [0] * (count - len(flags))
    else:
        begin = (r.optional(first) or 0) if first is not None else 0
        flags = [int(i >= begin and not _is_global(i, every, global_first)) for i in range(count)]
    return {"sliding_window": size, "sliding_window_pattern": compact(flags)} if any(flags) else {}


def _is_global(index: int, every: int | None, global_first: bool) -> bool:
    if every is None:
        return False
    return index % every == 0 if global_first else (index + 1) % every == 0


def compact(flags: list[int]) -> int | list[int] | None:
    """The shortest `sliding_window_pattern` that says `flags`, a 1 for every window."""
    if all(flags):
        return None
    period = flags.index(0) + 1
    return period if all(flag == int((i + 1) % period != 0) for i, flag in enumerate(flags)) else flags
