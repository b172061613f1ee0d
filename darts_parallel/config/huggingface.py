"""A Hugging Face `config.json` as a model configuration, by the model of `transformers`.

`_meta_model` builds it on the meta device (shapes without weights, no network) and counts the
matrix products of a forward pass, `_model_shapes` gives every weight a role, and
`problem/referee.py` compares both with the priced layers.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from functools import lru_cache
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from darts_parallel.config._imported import Imported
from darts_parallel.config.model import ModelConfig
from darts_parallel.errors import ConfigError, Entries, UnsupportedError, read_json


def read_file(path: str) -> Imported:
    """Return the model that the file (or the `config.json` of the folder) at `path` describes.

    Errors:
        ConfigError: the file cannot be read, is not a JSON object, or not a known model.
        UnsupportedError: `transformers` is missing, or a part of the model is not modelled.
    """
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    place = f"model.path={path}"
    near = "the path of a Hugging Face config.json on this machine"
    values = read_json(file, place, near, ConfigError)
    if not isinstance(values, dict):
        raise ConfigError(f"{place} must hold a JSON object; try {near}.")
    folder = file.absolute().parent.name
    name = folder if file.name == "config.json" and folder else file.stem
    return _import_cached(json.dumps(values), place, name)


@lru_cache(maxsize=8)
def _import_cached(text: str, place: str, name: str) -> Imported:
    return import_model(json.loads(text), place, name)


def import_model(values: Entries, place: str, name: str) -> Imported:
    """Return the model that a parsed `config.json` describes.

    Args:
        name: The model's name where the file gives none.

    Errors:
        ConfigError: an unknown architecture, or a value that its class refuses.
        UnsupportedError: `transformers` is missing, or a part of the model is not modelled.
    """
    try:
        from darts_parallel.config._meta_model import describe
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise UnsupportedError(
            f"{place} needs the package transformers, which is not installed; try pip install "
            "'transformers>=5.23', on Python 3.11 or newer."
        ) from None
    given = str(values.get("_name_or_path") or "").rstrip("/").rpartition("/")[2]
    return describe(values, place, given or name)


def resolve_path(
    composed: DictConfig,
    overrides: Sequence[str] = (),
    check: Callable[[Imported], str] | None = None,
) -> DictConfig:
    """Return `composed` with `model.path` replaced by what its file says; errors as `read_file`.

    What the command or a model file gives beside the path wins over the file.

    Args:
        overrides: The overrides that it was composed with.
        check: Refuses a model that is imported wrongly, and names small parts that have no price.
    """
    model = composed.get("model")
    path = model.get("path") if isinstance(model, DictConfig) else None
    if path is None or model.get("inputs") is not None:
        return composed
    imported = read_file(str(path))
    found = dict(imported.fields)
    if check is not None:
        missing = [found["not_priced"], check(imported)]
        found["not_priced"] = "; ".join(filter(None, missing)) or None
    defaults = {f.name: None if f.default is MISSING else f.default for f in fields(ModelConfig)}
    named = {m.group(1) for o in overrides if (m := re.match(r"\+{0,2}model\.(\w+)=", o))}
    kept = {
        key: model[key]
        for key in defaults
        if not OmegaConf.is_missing(model, key) and (key in named or model[key] != defaults[key])
    }
    result = composed.copy()
    OmegaConf.update(result, "model", {**found, **kept, "path": None}, merge=True)
    return result
