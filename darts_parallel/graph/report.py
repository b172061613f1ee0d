"""Write and print a plan: `graph.json`, the report."""

import re
from collections import Counter, defaultdict

from darts_parallel.errors import Amounts, Entries
from darts_parallel.graph._programme import ProgrammeAnswer
from darts_parallel.graph._rules import unknown_operators
from darts_parallel.graph._states import SLICED, VARYING
from darts_parallel.graph.descent import DescentAnswer
from darts_parallel.graph.operators import OUTPUT, RELAY, SOURCES, GraphOperator
from darts_parallel.graph.plan import GraphPlan, PlannedGraph

MIB = 2.0**20
MILLI = 1e3
PERCENT = 100.0
LISTED = 12
"""Operators that the report lists: those with most seconds."""
DESCENT = {
    "raw_s": "seconds",
    "rounded_s": "rounded_seconds",
    "raw_fits": "fits",
    "descent_s": "search_seconds",
}
"""Names in `graph.json` of the fields of `DescentAnswer`."""
PROGRAMME = {"lp_s": "lp_seconds", "proven": "proven", "programme_s": "solve_seconds"}
"""Names in `graph.json` of the fields of `ProgrammeAnswer`."""
SPELLED = {"R": "Replicate", VARYING: "Replicate", SLICED: "Replicate", "P": "Partial"}
STYLES = {"columns": "colwise", "inner": "rowwise"}
"""Words of transformers for what a linear layer splits."""


def spelled(state: str) -> str:
    """Return a placement as DTensor writes it."""
    return SPELLED.get(state) or f"Shard({state[1:]})"


def claim(programme: ProgrammeAnswer) -> str:
    """Say in one sentence what is proven of the written plan."""
    if programme.proven:
        kind = "linear relaxation is whole" if programme.tight else "integer program is solved"
        return f"no plan of the space is faster (the {kind})"
    gap = programme.seconds / (programme.lp_seconds or 1e-300) - 1.0
    return (
        f"at most {PERCENT * gap:.2f} % above the linear relaxation "
        "(the integer program ran out of time)"
    )


def graph_dict(planned: PlannedGraph) -> Entries:
    """Return the content of `graph.json`."""
    plan = planned.plan
    graph = planned.graph
    programme = planned.programme
    found: Entries = {"cluster": plan.space.mesh.cluster.name}
    found["mesh"] = list(plan.space.mesh.ranks)
    found["operators"] = [_operator(plan, op) for op in graph.operators]
    found["collectives"] = [one.entry() for one in plan.collectives]
    for key, name in DESCENT.items():
        found[key] = getattr(planned.descent, name, None)
    found["improved_s"] = plan.seconds
    for key, name in PROGRAMME.items():
        found[key] = getattr(programme, name)
    found["claim"] = claim(programme)
    unknown = unknown_operators(graph)
    found["unknown_operators"] = sorted({op.op for op in unknown})
    found["unknown_count"] = len(unknown)
    found["computing_operators"] = len(graph.computing)
    found["choice_groups"] = len(plan.space.groups)
    found["capture_s"] = graph.seconds
    found["plan"] = summary(plan)
    found["tp_plan"] = tensor_parallel_plan(planned)
    return found


def _operator(plan: GraphPlan, op: GraphOperator) -> Entries:
    """Return an operator as `graph.json` lists it."""
    choice = plan.choice(op)
    found: Entries = {name: getattr(op, name) for name in ("name", "op", "module", "target")}
    found["shape"] = list(plan.space.graph.shapes(op.outputs or op.inputs)[0])
    found["split"] = list(choice.labels)
    for end in ("inputs", "outputs"):
        found[end] = [list(map(spelled, state)) for state in getattr(choice, end)]
    found["seconds"] = choice.seconds
    return found


def summary(plan: GraphPlan) -> Amounts:
    """Return seconds of a step, number of collectives and their bytes."""
    sizes = [one.step.bytes for one in plan.collectives]
    return {"seconds": plan.seconds, "collectives": len(sizes), "bytes": sum(sizes)}


def report_lines(planned: PlannedGraph) -> list[str]:
    """Return the report: what was captured, what splits, what communicates, what is proven."""
    plan = planned.plan
    lines = [_capture_line(planned)]
    if unknown := Counter(op.op for op in unknown_operators(planned.graph)).most_common():
        names = ", ".join(f"{name} ({count})" for name, count in unknown)
        lines.append(f"not split (operator not supported): {names}")
    lines += _split_lines(plan)
    lines += _collective_lines(plan)
    lines.append(_plan_line(planned))
    if planned.descent is not None:
        lines.append(_descent_line(plan, planned.descent))
    return lines


def _capture_line(planned: PlannedGraph) -> str:
    mesh = planned.plan.space.mesh
    computing = planned.graph.computing
    kinds = {op.op for op in computing}
    return (
        f"captured: {len(computing)} operators of {len(kinds)} kinds in "
        f"{planned.graph.seconds:.1f} s; {len(planned.plan.space.groups)} choices on a mesh of "
        f"{' x '.join(map(str, mesh.ranks))} ({mesh.cluster.name})"
    )


def _plan_line(planned: PlannedGraph) -> str:
    programme = planned.programme
    return (
        f"{MILLI * planned.plan.seconds:.4f} ms per step, forward and backward; "
        f"{'' if programme.proven else 'not '}proven: {claim(programme)}; "
        f"bound {MILLI * programme.lp_seconds:.4f} ms, {programme.variables} variables, "
        f"{programme.solve_seconds:.1f} s"
    )


def _descent_line(plan: GraphPlan, descent: DescentAnswer) -> str:
    above = PERCENT * (descent.seconds / plan.seconds - 1.0)
    rounded = PERCENT * (descent.rounded_seconds / plan.seconds - 1.0)
    fits = "" if descent.fits else ", over the memory"
    return (
        f"raw: {MILLI * descent.seconds:.4f} ms, {above:.2f} % above ({rounded:.2f} % before "
        f"coordinate descent{fits}), in {descent.search_seconds:.1f} s"
    )


def _split_lines(plan: GraphPlan) -> list[str]:
    """List what the operators with most seconds split, equal ones of repeated blocks in one line."""
    space = plan.space
    rows = []
    for group, seconds, choice in zip(space.groups, space.seconds, plan.assignment, strict=True):
        if group.operators[0].op not in (*SOURCES, OUTPUT, RELAY):
            rows.append((float(seconds[choice]), group))
    total = sum(seconds for seconds, _ in rows) or 1.0
    rows.sort(key=lambda row: -row[0])
    lines = []
    for spent, group in rows[:LISTED]:
        op, *others = group.operators
        times = f" x {len(others) + 1}" if others else ""
        splits = ", ".join(plan.choice(op).labels)
        share = PERCENT * spent / total
        lines.append(f"  {share:5.1f} % {op.op}{times} ({op.module or op.name}): splits {splits}")
    return lines


def _collective_lines(plan: GraphPlan) -> list[str]:
    """Sum the collectives by pass, kind and content."""
    sums: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for one in plan.collectives:
        sums[one.when, one.step.kind, one.of].append(one.step.bytes)
    lines = []
    for (when, kind, of), sizes in sorted(sums.items(), reverse=True):
        lines.append(f"{when}: {len(sizes)} x {kind} of {of}s, {sum(sizes) / MIB:.2f} MiB")
    return lines or ["collectives: none"]


def tensor_parallel_plan(planned: PlannedGraph) -> dict[str, str]:
    """Return the linear layers that the last axis splits, in the words of a `tp_plan` of transformers.

    Indices of repeated layers are `*`; layers whose copies differ keep theirs.
    """
    styles: dict[str, dict[str, str]] = defaultdict(dict)
    for op in planned.graph.of_kind("linear"):
        if op.module:
            pattern = re.sub(r"(?<![^.])\d+(?![^.])", "*", op.module)
            split = planned.plan.choice(op).labels[-1]
            styles[pattern][op.module] = STYLES.get(split, "")
    found: dict[str, str] = {}
    for pattern, modules in styles.items():
        first, *others = set(modules.values())
        found |= modules if others else {pattern: first}
    return {name: style for name, style in found.items() if style}
