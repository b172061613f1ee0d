"""What no plan explains: one plan of one job, measured in several releases or on several days."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from math import exp, log

from experiments.calibration.errors import ErrorSummary, summarise
from experiments.calibration.problems import Case


def repeat_errors(cases: Sequence[Case]) -> ErrorSummary:
    """Errors of a model that knew the geometric mean of every repeated plan's seconds.

    Repeats are runs of equal model, devices, software family, plan and job; plans that were measured once are
    left out. A model of plans and hardware cannot be better than this on them.
    """
    groups: dict[tuple[object, ...], list[float]] = defaultdict(list)
    for case in cases:
        run = case.run
        if run.iteration_s is not None:
            model = replace(case.problem.model.config, name="")  # sources spell it differently
            job = (model, case.problem.config.training, case.problem.config.cluster)
            groups[repr((run.stack.family, *job)), case.plan].append(run.iteration_s)
    predicted: list[float] = []
    measured: list[float] = []
    for seconds in groups.values():
        if len(seconds) > 1:
            known = exp(sum(log(value) for value in seconds) / len(seconds))
            predicted += [known] * len(seconds)
            measured += seconds
    return summarise(predicted, measured)


def repeat_sentence(cases: Sequence[Case]) -> str:
    """The errors of `repeat_errors`, dense models and mixtures apart; empty without a repeat."""
    parts = []
    for name, own in (("dense", False), ("mixture", True)):
        found = repeat_errors([case for case in cases if case.problem.model.has_experts == own])
        if found.count:
            parts.append(
                f"{found.count} {name} runs {100 * found.median:.1f} % median, {100 * found.mean:.1f} % mean"
            )
    if not parts:
        return ""
    return (
        "One plan of one job in several releases or on several days, against its own geometric mean, which "
        f"no model of plans can beat: {'; '.join(parts)}."
    )
