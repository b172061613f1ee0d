"""Functions of the user's own files, named as `package.file:function`."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from darts_parallel.config.checks import require
from darts_parallel.errors import ConfigError


def load_function(key: str, path: str) -> Callable[..., Any]:
    """Import `package.file:function`, also from the current folder; this runs the user's code.

    Errors:
        ConfigError: no such file or function.
    """
    setting = f"{key}={path}"
    name, _, function = path.partition(":")
    example = f"{key}=package.file:function"
    require(bool(name and function), setting, "name a file and a function", example)
    imported = _imported(key, name, function)
    made = getattr(imported, function, None)
    if callable(made):
        return made
    items = vars(imported).items()
    known = [own for own, value in items if callable(value) and not own.startswith("_")]
    raise ConfigError(
        f"{setting}: {imported.__name__} has no function {function}; "
        f"try one of {', '.join(known) or 'its own'}."
    )


def _imported(key: str, name: str, function: str) -> ModuleType:
    """Import the user's file, from the current folder too."""
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:  # the user's file runs here
        parts = name.removesuffix(".py").split("/")
        dotted = ".".join(part for part in parts if part.strip("."))
        better = f"a file that python -c 'import {name}' runs"
        if dotted != name:
            better = f"{key}={dotted}:{function}"
        raise ConfigError(
            f"{key}={name}:{function}: {name} cannot be imported "
            f"({type(error).__name__}: {error}); try {better}."
        ) from error
