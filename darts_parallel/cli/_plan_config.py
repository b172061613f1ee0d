"""The configuration of a plan file, with what the command changes of it."""

from collections.abc import Sequence
from dataclasses import asdict

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from darts_parallel.cli._arguments import COMPOSED, PRINTED
from darts_parallel.config import Config, given_values, require, to_config
from darts_parallel.errors import ConfigError, PlanError
from darts_parallel.plans import own_config, required_config
from darts_parallel.problem import check_import as check_import

SET_BY_TRAINER = {"space.trainer", "training.software"}
"""Keys of other groups that a file of the group `trainer` sets."""


def changed_config(
    own: Config, source: str, composed: DictConfig, given: Sequence[str], kept: Sequence[str]
) -> Config:
    """Return a plan's own configuration with what the command changes of it.

    Args:
        source: Key and path of that file, for messages.
        given: Its overrides. A group (`cluster=...`) replaces the plan's own, a key of a group
            (`cluster.nodes.0.count=6`) changes it.
        kept: Root keys that always come from the command.

    Errors:
        ConfigError: a key does not fit the plan's configuration, or a value breaks a rule.
    """
    merged = OmegaConf.create(asdict(own))
    overrides = given_values([override.lstrip("+~") for override in given])
    replaced = {key for key in overrides if "." not in key}
    composed_keys = {*replaced, *kept} & {str(key) for key in composed}
    if "trainer" in replaced:
        composed_keys |= SET_BY_TRAINER
    for key in composed_keys:
        OmegaConf.update(merged, key, OmegaConf.select(composed, key))
    for key, value in overrides.items():
        root = key.partition(".")[0]
        if root != key and root in merged and root not in (*replaced, *kept):
            _change(merged, key, value, source)
    return to_config(merged, given, check_import)


def _change(config: DictConfig, key: str, value: str, source: str) -> None:
    """Set one key of a plan's own configuration."""
    try:
        OmegaConf.update(config, key, OmegaConf.from_dotlist([f"value={value}"]).value)
    except (OmegaConfBaseException, ValueError, TypeError):
        rule = f"does not fit the plan in {source}; try a key of its config"
        raise ConfigError(f"{key}={value} {rule}.") from None


def tuned_config(path: str, composed: DictConfig, given: Sequence[str]) -> Config:
    """Return the configuration of the plan at `path`, which `tune.from` names, as `changed_config`.

    Errors:
        PlanError: the file is no plan with a configuration, or of another model.
        ConfigError: the batch or its sequences would change, or a value breaks a rule.
    """
    own = required_config(path, "tune.from")
    source = f"tune.from={path}"
    config = changed_config(own, source, composed, given, COMPOSED)
    if asdict(config.model) != asdict(own.model):
        raise PlanError(
            f"{source} was made for model={own.model.name}, and this command asks for another "
            f"(model={config.model.name}); try model={own.model.name} with its own sizes."
        )
    rule = f"stay what the plan in {source} trains with"
    for key in ("global_batch_size", "seq_len"):
        given = getattr(config.training, key)
        old = getattr(own.training, key)
        require(given == old, f"training.{key}={given}", rule, old)
    return config


def evaluated_config(path: str, composed: DictConfig, given: Sequence[str]) -> Config:
    """Return the configuration of the plan at `path`, which `plan` names, as `changed_config`.

    The composed configuration holds where the file has none of its own.

    Errors:
        PlanError: the file cannot be read.
        ConfigError: a key does not fit the plan's configuration, or a value breaks a rule.
    """
    own = own_config(path)
    if own is None:
        return to_config(composed, given, check_import)
    return changed_config(own, f"plan={path}", composed, given, PRINTED)
