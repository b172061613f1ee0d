"""Which configuration a command means: the composed one, or that of a plan file with what it changes."""

from collections.abc import Sequence
from dataclasses import asdict

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from darts_parallel.config import Config, refuse_silent_overrides, to_config
from darts_parallel.errors import ConfigError, PlanError
from darts_parallel.plans import own_config, required_config
from darts_parallel.problem import check_import

COMPOSED = ("output", "tune", "verification")
"""Root keys that always come from the command."""
PRINTED = ("plan", "export", "explain", "price", "output")
"""Root keys that change only what is written and printed, not the problem."""
SOURCES = {"tune.from": "tries plans of its own", "plan": "evaluates a given one"}
"""Keys that name a plan, and what the command does with it."""


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
    overrides = [override.lstrip("+~").partition("=")[::2] for override in given]
    groups = {key for key, _ in overrides if "." not in key}
    set_by_trainer = ("space.trainer", "training.software") if "trainer" in groups else ()
    for key in (*groups, *kept, *set_by_trainer):
        if key in composed or "." in key:
            OmegaConf.update(merged, key, OmegaConf.select(composed, key))
    for key, value in overrides:
        root = key.partition(".")[0]
        if root != key and root in merged and root not in (*groups, *kept):
            try:
                OmegaConf.update(merged, key, OmegaConf.from_dotlist([f"value={value}"]).value)
            except (OmegaConfBaseException, ValueError, TypeError):
                raise ConfigError(
                    f"{key}={value} does not fit the plan in {source}; try a key of its config."
                ) from None
    return to_config(merged, given, check_import)


def tuned_config(path: str, composed: DictConfig, given: Sequence[str]) -> Config:
    """Return the configuration of the plan at `path`, which `tune.from` names, as `changed_config`.

    Errors:
        PlanError: the file is no plan with a configuration, or of another model.
        ConfigError: the global batch would change, or a value breaks a rule.
    """
    own, source = required_config(path, "tune.from"), f"tune.from={path}"
    config = changed_config(own, source, composed, given, COMPOSED)
    if asdict(config.model) != asdict(own.model):
        raise PlanError(
            f"{source} was made for model={own.model.name}, and this command asks for another "
            f"(model={config.model.name}); try model={own.model.name} with its own sizes."
        )
    batch, old = config.training.global_batch_size, own.training.global_batch_size
    if batch != old:
        raise ConfigError(
            f"training.global_batch_size={batch} must stay what the plan in {source} trains with; try {old}."
        )
    return config


def job_config(composed: DictConfig, given: Sequence[str]) -> Config:
    """Return the composed configuration, or the given plan's own with what the command changes of it.

    A plan is priced on the problem that it was made for: `plan=FILE cluster.inter_node.bandwidth_GBps=10`
    changes that one figure, `cluster=NAME` the whole group. A named run (`experiment=NAME`) is the problem
    that it names, whatever plan is priced on it.

    Errors:
        ConfigError, PlanError: a value breaks a rule, or a plan file does not fit.
    """
    refuse_silent_overrides(given)
    asked = {key: OmegaConf.select(composed, key) for key in SOURCES}
    (key, path), *others = [(key, path) for key, path in asked.items() if path is not None] or [
        ("", None)
    ]
    if others:
        other = "{}={}".format(*others[0])
        raise ConfigError(
            f"{key}={path} {SOURCES[key]}, and {other} {SOURCES[others[0][0]]}: one command does one of "
            f"both; try {key}={path} alone."
        )
    if key == "tune.from":
        return tuned_config(str(path), composed, given)
    named = key == "" or any(override.startswith("experiment=") for override in given)
    own = None if named else own_config(str(path))
    if own is None:
        return to_config(composed, given, check_import)
    return changed_config(own, f"plan={path}", composed, given, PRINTED)
