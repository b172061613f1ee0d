"""Keys of earlier versions: a file that an earlier version wrote stays readable.

A removed key is ignored, a renamed key or value is translated, and one line on standard error says
so. This holds for a `plan.json`, the plan of an exported program, and files of a folder for
`--config-dir`. A key that a user types is refused as any unknown key.
"""

import atexit
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import takewhile
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from darts_parallel.config.checks import as_yaml
from darts_parallel.config.trainer import module_data
from darts_parallel.errors import read_text

NEWER = dict.fromkeys(("kernel_gap_us", "collective_start_us", "divided_half_size"), 0.0)
"""Figures that devices of earlier versions had not, and that cost nothing there."""
GROUP_KEYS = {"device": "cluster.devices.*", "_global_": ""}
"""Keys at which files stand whose group or package has another name than the key."""
PACKAGE = re.compile(r"^# *@package +(\S+)", re.MULTILINE)
"""The line by which a file of Hydra names the key at which it stands."""


@dataclass(frozen=True)
class OldKey:
    """One key that a version removed or renamed."""

    key: str
    """Dotted key in the configuration; `*` stands for any entry of a list or a mapping."""
    new_name: str | None = None
    """Name of the key that replaces it in the same mapping; None: the key was removed."""
    new_values: Mapping[Any, Any] = field(default_factory=dict)
    """New spelling of each value that changed; other values stay."""


OLD_KEYS = tuple(OldKey(key, **(change or {})) for key, change in module_data(__file__).items())
"""Every key that a version removed or renamed, from `old_keys.yaml` next to this file."""


def translate(values: Any, source: str, place: str = "") -> bool:
    """Replace the old keys in the content of a file, and say so in one line on standard error.

    Args:
        values: Mappings and lists as YAML or JSON have them; changed in place.
        source: Name of the file for the line.
        place: Dotted key at which `values` stand in the configuration; empty for the root.

    Returns:
        Whether anything changed.
    """
    changes = list(_translated(values, place))
    if changes:
        told = "; ".join(dict.fromkeys(changes))
        print(f"{source} is of an earlier version: {told}.", file=sys.stderr)
    return bool(changes)


def _translated(values: Any, place: str) -> Iterator[str]:
    """Translate mappings and lists from the root to the leaves; yield what changed."""
    if isinstance(values, list):
        for inner in values:
            yield from _translated(inner, f"{place}.*")
        return
    if not isinstance(values, dict):
        return
    if "expert_overhead_us" in values:  # a device with all figures of its version
        values |= NEWER | values
    for name in list(values):
        key = f"{place}.{name}".lstrip(".")
        yield from _translated(values[name], key)
        for old in OLD_KEYS:
            if _same_key(key, old.key):
                yield from _replaced(values, name, key, old)


def _same_key(key: str, pattern: str) -> bool:
    """Return whether each part of a dotted key is that of the pattern."""
    parts = key.split(".")
    patterns = pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


def _replaced(values: dict[Any, Any], name: str, key: str, old: OldKey) -> Iterator[str]:
    """Remove or replace one entry of a mapping; yield the change in words, if any."""
    if old.new_name is None:
        del values[name]
        yield f"{key} is ignored"
        return
    value = values[name]
    changed = isinstance(value, (bool, int, float, str)) and value in old.new_values
    new_value = old.new_values[value] if changed else value
    if not changed and old.new_name == name:
        return
    del values[name]
    values.setdefault(old.new_name, new_value)
    new_key = key.removesuffix(name) + old.new_name
    yield f"{key}={as_yaml(value)} is read as {new_key}={as_yaml(new_value)}"


def yaml_files(folder: str) -> list[Path]:
    """List the YAML files of a folder for `--config-dir`, those of its groups last."""
    return [*Path(folder).glob("*.yaml"), *Path(folder).glob("*/*.yaml")]


def current_folder(folder: str) -> str:
    """Return a folder of configuration files, or a copy if files have old keys."""
    files = yaml_files(folder)
    changed = {}
    for path in files:
        with suppress(OSError, ValueError, YAMLError, OmegaConfBaseException):
            text = read_text(path)
            # a file that cannot be read is refused where Hydra reads it
            values = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
            if translate(values, str(path), _place(text, path.parent.relative_to(folder))):
                comments = takewhile(lambda line: line.startswith("#"), text.splitlines())
                changed[path] = "\n".join([*comments, OmegaConf.to_yaml(OmegaConf.create(values))])
    if not changed:
        return folder
    copy = Path(tempfile.mkdtemp(prefix="darts-parallel-"))
    atexit.register(shutil.rmtree, copy, ignore_errors=True)
    for path in files:
        target = copy / path.relative_to(folder)
        target.parent.mkdir(exist_ok=True)
        target.write_text(changed.get(path) or path.read_text(encoding="utf-8"), encoding="utf-8")
    return str(copy)


def _place(text: str, group: Path) -> str:
    """Return the dotted key of a file: the package in its head, or else its group."""
    head = PACKAGE.search(text)
    package = head[1] if head else ".".join(group.parts)
    return GROUP_KEYS.get(package, package)
