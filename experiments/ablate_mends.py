"""What does each part of the cost model's structure do for runs that its calibration never saw?

    python -m experiments.ablate_mends data=FOLDER                    (about 6 CPU minutes)
    python -m experiments.ablate_mends data=FOLDER held_out=[model] publish=true

Takes one part away at a time (NVLink domains, a software's efficiencies, what it sends, ...), fits again
and predicts every fold of runs that it left out, by one Gauss-Newton step from the calibrated parameters. The
table compares the error of the runs that the part touches, and of all, with that of the whole model. Errors
of a fold are linear in the step, so that the figures of the whole model differ a little from those of
experiments.validate_cost_model.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from darts_parallel.config.checks import require_members
from darts_parallel.config.options import run_main
from darts_parallel.plan.file import write_text
from darts_parallel.problem.problem import Problem
from darts_parallel.report.tables import filled_table, markdown_table
from experiments.calibrate import usable_cases
from experiments.calibration.calibrated import SHIPPED, Calibrated
from experiments.calibration.crossvalidation import KINDS, folds
from experiments.calibration.errors import ErrorSummary, summarise
from experiments.calibration.fit import Residuals, residuals, step
from experiments.calibration.parameters import QUANTITIES, Parameters, Quantity
from experiments.calibration.predict import place_of
from experiments.calibration.problems import Case
from experiments.results_page import console_of, publish, result_folder

METHOD = """\
Each line takes one part of the model away, fits all parameters anew and predicts the runs of every fold
without it, by one Gauss-Newton step from the calibrated parameters, with errors linear in that step. `runs
touched` are those whose problem the part changes (all, where it changes what is fitted); errors are medians
and means of |predicted / measured - 1| of the seconds, before > after for the runs touched."""


@dataclass
class AblationOptions:
    """Which runs, which parameters, which folds."""

    data: str = ""
    """Folder of CSV files of measured runs."""
    parameters: str = str(SHIPPED)
    """Fitted parameters, as python -m experiments.calibrate writes them."""
    held_out: list[str] = field(default_factory=lambda: ["source", "model"])
    out: str = "outputs/ablate_mends"
    publish: bool = False
    """Write experiments/results/ablate_mends.md, too."""

    def __post_init__(self) -> None:
        require_members("held_out", self.held_out, KINDS)


@dataclass(frozen=True)
class Part:
    """One part of the structure, and how to take it away."""

    name: str
    problem: Callable[[Problem], Problem] = lambda problem: problem
    quantities: Callable[[Quantity], Quantity | None] = lambda quantity: quantity
    """Of None nothing is fitted: it stays at its prior."""


def _no_domains(problem: Problem) -> Problem:
    cluster = problem.cluster
    groups = tuple(replace(group, domain_nodes=1) for group in cluster.groups)
    return replace(problem, cluster=replace(cluster, groups=groups))


def _software(**changes: object) -> Callable[[Problem], Problem]:
    def without(problem: Problem) -> Problem:
        return replace(problem, software=replace(problem.software, **changes))  # type: ignore[arg-type]

    return without


def _one_kind_of_nodes(problem: Problem) -> Problem:
    first = problem.cluster.groups[0]
    groups = tuple(
        replace(g, device=first.device, intra_node=first.intra_node, inter_node=None)
        for g in problem.cluster.groups
    )
    return replace(problem, cluster=replace(problem.cluster, groups=groups))


def _without_scopes(*words: str) -> Callable[[Quantity], Quantity | None]:
    def shared(quantity: Quantity) -> Quantity | None:
        kept = tuple(d for d in quantity.deviations if not set(d[0].split("+")) & set(words))
        return replace(quantity, deviations=kept)

    return shared


def _fixed(*names: str) -> Callable[[Quantity], Quantity | None]:
    return lambda quantity: None if quantity.name in names else quantity


EXPERTS = (
    "grouped_gemm_efficiency", "all_to_all_efficiency", "flex_gain", "permutation_factor",
    "expert_overhead_us",
)  # fmt: skip
PARTS = (
    Part("NVLink domains of several nodes", _no_domains),
    Part("what a software sends (16-bit gradients, broadcasts of owners)",
         _software(gradient_bytes=None, owner_broadcast=0.0)),
    Part("ZeRO-3 of DeepSpeed over one ring", _software(single_ring=False)),
    Part("mixed nodes: the slowest member decides", _one_kind_of_nodes),
    Part("any figure of a software", quantities=_without_scopes("stack")),
    Part("any figure of a device", quantities=_without_scopes("device")),
    Part("links by kind", quantities=_without_scopes("intra", "inter")),
    Part("hidden tensor-parallel communication", quantities=_fixed("tp_hidden_share")),
    Part("launches of experts", quantities=_fixed("expert_overhead_us")),
    Part("all fitted figures of experts", quantities=_fixed(*EXPERTS)),
)  # fmt: skip


def ablate(options: AblationOptions) -> int:
    """Fit without each part, print and write; returns the exit status."""
    console = console_of(140, highlight=False)
    cases = [case for case in usable_cases(options.data) if case.run.iteration_s is not None]
    start = Calibrated.read(Path(options.parameters))
    whole = Parameters([place_of(case) for case in cases])
    found = residuals(cases, whole, start.latent(whole))
    lines: list[tuple[str, ...]] = []
    for kind in options.held_out:
        base = held_out_errors(cases, whole, start, found, kind)
        lines.append((kind, "whole model", str(len(base)), *_figures(base), "", ""))
        for part in PARTS:
            error, touched = without(part, cases, whole, start, found, kind)
            lines.append((kind, f"without {part.name}", str(int(touched.sum())), *_figures(error),
                          *_figures(error[touched], base[touched])))  # fmt: skip
            console.print(f"{kind}: without {part.name}")
    console.print(filled_table("Held-out error of the seconds, %", HEADERS, lines, (0, 1)))
    page = "\n".join(markdown_table(HEADERS, lines, (0, 1)))
    out = result_folder(options.out)
    write_text(out / "ablate_mends.md", page + "\n")
    if options.publish:
        command = "python -m experiments.ablate_mends data=FOLDER"
        publish("ablate_mends", "What does each part of the cost model do for unseen runs?", command,
                f"{METHOD}\n\n{page}", {})  # fmt: skip
    console.print(f"{out}/ablate_mends.md", highlight=False, markup=False)
    return 0


HEADERS = (
    "held out by",
    "model",
    "runs touched",
    "all: median",
    "all: mean",
    "touched: median",
    "touched: mean",
)


def _figures(error: Tensor, before: Tensor | None = None) -> tuple[str, str]:
    """Median and mean in percent; with `before` as `with the part > without it`."""
    if not len(error):
        return "", ""
    new = _summary(error)
    if before is None:
        return f"{100 * new.median:.1f}", f"{100 * new.mean:.1f}"
    old = _summary(before)
    return (
        f"{100 * old.median:.1f} > {100 * new.median:.1f}",
        f"{100 * old.mean:.1f} > {100 * new.mean:.1f}",
    )


def _summary(error: Tensor) -> ErrorSummary:
    return summarise(error.exp().tolist(), [1.0] * len(error))


def without(
    part: Part, cases: Sequence[Case], whole: Parameters, start: Calibrated, found: Residuals, kind: str
) -> tuple[Tensor, Tensor]:
    """Held-out errors of all runs without a part, and which runs it touches, each `(N,)`."""
    changed = [replace(case, problem=part.problem(case.problem)) for case in cases]
    touched = torch.tensor([a.problem != b.problem for a, b in zip(cases, changed, strict=True)])
    fitted = [part.quantities(q) for q in QUANTITIES]
    if fitted != list(QUANTITIES):
        kept = tuple(q for q in fitted if q is not None)
        return _refitted(cases, whole, start, found, kind, kept), torch.ones(len(cases), dtype=torch.bool)
    places = [i for i, hit in enumerate(touched.tolist()) if hit]
    mended = residuals([changed[i] for i in places], whole, start.latent(whole)) if places else None
    error, jacobian = found.error.clone(), found.jacobian.clone()
    if mended is not None:
        rows = mended.part == 0
        where = [i for i, p in enumerate(found.part.tolist()) if p == 0 and int(found.case[i]) in set(places)]
        error[where], jacobian[where] = mended.error[rows], mended.jacobian[rows]
    again = replace(found, error=error, jacobian=jacobian)
    return held_out_errors(cases, whole, start, again, kind), touched


def _refitted(
    cases: Sequence[Case],
    whole: Parameters,
    start: Calibrated,
    found: Residuals,
    kind: str,
    kept: tuple[Quantity, ...],
) -> Tensor:
    """Held-out errors where other quantities are fitted: latent numbers left out go back to the prior."""
    fewer = Parameters([place_of(case) for case in cases], kept)
    columns = [whole.index[key] for key in fewer.keys]
    latent = start.latent(whole)
    gone = latent.clone()
    gone[columns] = 0.0
    error = found.error - found.jacobian @ gone  # linear, as all of the fold's steps are
    again = replace(found, error=error, jacobian=found.jacobian[:, columns])
    return _predicted(cases, fewer, latent[columns], again, kind)


def held_out_errors(
    cases: Sequence[Case], parameters: Parameters, start: Calibrated, found: Residuals, kind: str
) -> Tensor:
    """log(predicted / measured) of every run's seconds, predicted without its fold, `(N,)`."""
    return _predicted(cases, parameters, start.latent(parameters), found, kind)


def _predicted(
    cases: Sequence[Case], parameters: Parameters, latent: Tensor, found: Residuals, kind: str
) -> Tensor:
    result = torch.zeros(len(cases), dtype=torch.float64)
    for members in folds(cases, kind).values():
        rest = found.without(members)
        moved = step(rest, latent, parameters, 0.0, rounds=20) - latent
        error = found.error + found.jacobian @ moved
        for index, (case, figure) in enumerate(zip(found.case.tolist(), found.part.tolist(), strict=True)):
            if figure == 0 and int(case) in members:
                result[int(case)] = error[index]
    return result


if __name__ == "__main__":
    raise SystemExit(run_main("experiments.ablate_mends", __doc__, AblationOptions, ablate))
