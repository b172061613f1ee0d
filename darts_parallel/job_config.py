"""Which configuration a command means: the composed one, or that of a plan file which it names."""

from collections.abc import Sequence
from dataclasses import asdict

from omegaconf import DictConfig, OmegaConf

from darts_parallel.config import Config
from darts_parallel.errors import ConfigError
from darts_parallel.planfile import own_config
from darts_parallel.problem import to_config
from darts_parallel.replan_config import replan_config

PRINTED = ("plan", "export", "explain", "output", "hydra")
"""Root keys that change only what is written and printed, not the problem."""


def job_config(composed: DictConfig, given: Sequence[str]) -> Config:
    """The composed configuration, or the given plan's own where nothing else is asked for.

    Args:
        composed: What the command composed.
        given: Its overrides.

    Errors:
        ConfigError, PlanError: a value breaks a rule, or a plan file does not fit.
    """
    source, plan = (OmegaConf.select(composed, key) for key in ("replan.from", "plan"))
    if source is not None and plan is not None:
        raise ConfigError(
            f"replan.from={source} searches a new plan, and plan={plan} evaluates a given one: one command "
            f"does one of both; nearest legal: replan.from={source} alone."
        )
    if source is not None:
        return replan_config(str(source), composed, given)
    config = to_config(composed, given)
    roots = {override.lstrip("+~").split("=")[0].split(".")[0] for override in given}
    if config.plan is None or roots - set(PRINTED):
        return config
    kept = {name: asdict(config)[name] for name in PRINTED if name != "hydra"}
    return own_config(config.plan, **kept) or config
