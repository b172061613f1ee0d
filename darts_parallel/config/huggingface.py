"""A Hugging Face `config.json` as a model configuration: the file, and where its values go."""

import json
import re
from collections.abc import Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from darts_parallel.config.huggingface_architectures import ARCHITECTURES, Reader
from darts_parallel.config.huggingface_classes.dense import FAMILIES
from darts_parallel.config.huggingface_classes.hybrids import HYBRIDS, has_experts
from darts_parallel.config.huggingface_mixtures import MIXTURES
from darts_parallel.config.model import ModelConfig
from darts_parallel.errors import ConfigError, UnsupportedError

NEEDED = ("name", "num_layers", "hidden_size", "num_heads", "vocab_size", "max_seq_len")
"""What a model file of one's own must say of an architecture that is not known here."""
READERS = {**ARCHITECTURES, **FAMILIES, **HYBRIDS, **MIXTURES}
"""By `model_type`: how its keys read, and what they are where the file is silent."""
EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def model_fields(values: dict[str, Any], place: str, name: str) -> dict[str, Any]:
    """Fields of `ModelConfig` that a parsed `config.json` says.

    Args:
        values: The file's object.
        place: The file in words, for messages.
        name: The model's name where the file gives none.

    Errors:
        ConfigError: an unknown architecture, a key of the wrong type.
        UnsupportedError: a known architecture with a part that is not modelled (experts).
    """
    given = str(values.get("_name_or_path") or "").rstrip("/").rpartition("/")[2]
    nested = values.get("text_config")
    if isinstance(nested, dict):  # the language model of a multimodal one; its towers are not priced
        inherited: dict[str, Any] = {
            k: values[k] for k in ("tie_word_embeddings", "model_type") if k in values
        }
        values = {**inherited, **nested}
    kind = values.get("model_type")
    experts = next((key for key in EXPERT_KEYS if (values.get(key) or 0) not in (0, 1)), None)
    if experts is not None and kind not in MIXTURES and has_experts(values):
        raise UnsupportedError(
            f"{place}: model_type={kind} has {experts}={values[experts]} experts a layer, and "
            f"their sizes and routing are not modelled for it; try one of {', '.join(MIXTURES)}."
        )
    if not isinstance(kind, str) or kind not in READERS:
        raise ConfigError(
            f"{place}: model_type={kind} must be one of {', '.join(READERS)}; try a model "
            f"file of your own (--config-dir) with the fields {', '.join(NEEDED)} and what "
            "darts_parallel/config/model.py lists where its defaults differ."
        )
    read, defaults = READERS[kind]
    return {"name": given or name, **read(Reader(values, defaults, place))}


def read_file(path: str) -> dict[str, Any]:
    """Fields of `ModelConfig` that the file (or the `config.json` of the folder) at `path` says.

    Errors:
        ConfigError: the file cannot be read, is not a JSON object, or not a known model.
    """
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    place = f"model.path={path}"
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{place} cannot be read ({error.strerror}); try a Hugging Face config.json."
        ) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{place} is not valid JSON ({error}); try a Hugging Face config.json.") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{place} must hold a JSON object; try a Hugging Face config.json.")
    folder = file.absolute().parent.name
    return model_fields(values, place, folder if file.name == "config.json" and folder else file.stem)


def resolve_path(composed: DictConfig, overrides: Sequence[str] = ()) -> DictConfig:
    """`composed` with `model.path` replaced by what its file says.

    What the command or a model file gives beside the path wins over the file.

    Args:
        composed: A composed configuration.
        overrides: The overrides that it was composed with.

    Errors:
        ConfigError: as `read_file`.
    """
    model = composed.get("model")
    path = model.get("path") if isinstance(model, DictConfig) else None
    if path is None:
        return composed
    defaults = {f.name: None if f.default is MISSING else f.default for f in fields(ModelConfig)}
    named = {m.group(1) for o in overrides if (m := re.match(r"\+{0,2}model\.(\w+)=", o))}
    kept = {
        key: model[key]
        for key in defaults
        if not OmegaConf.is_missing(model, key) and (key in named or model[key] != defaults[key])
    }
    result = composed.copy()
    OmegaConf.update(result, "model", {**read_file(str(path)), **kept, "path": None}, merge=True)
    return result
