"""The configuration of a command: composed, or that of a plan file with changes."""

from collections.abc import Sequence

from omegaconf import DictConfig, OmegaConf

from darts_parallel.config import Config, Imported, refuse_silent_overrides, require, to_config


def job_config(composed: DictConfig, given: Sequence[str]) -> Config:
    """Return the composed configuration, or the given plan's own with the command's changes.

    A plan is priced on the problem that it was made for: `plan=FILE
    cluster.inter_node.bandwidth_GBps=10` changes that one figure, `cluster=NAME` the whole group. A
    named run (`experiment=NAME`) is the problem that it names, whatever plan is priced on it.

    Errors:
        ConfigError, PlanError: a value breaks a rule, or a plan file does not fit.
    """
    refuse_silent_overrides(given)
    tuned, plan = (OmegaConf.select(composed, key) for key in ("tune.from", "plan"))
    if tuned is not None and plan is not None:
        require(False, f"tune.from={tuned}", f"go without plan={plan}", f"tune.from={tuned} alone")
    problem_named = any(override.startswith("experiment=") for override in given)
    if tuned is None and (plan is None or problem_named):
        return to_config(composed, given, _check_imported)
    from darts_parallel.cli._plan_config import evaluated_config, tuned_config

    if tuned is not None:
        return tuned_config(str(tuned), composed, given)
    return evaluated_config(str(plan), composed, given)


def _check_imported(imported: Imported) -> str:
    """Refuse a Hugging Face model that the layers do not describe; only then torch is needed."""
    from darts_parallel.cli._plan_config import check_import

    return check_import(imported)
