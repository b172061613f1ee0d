"""Write and print a plan: `graph.json`, the report."""

import re
from collections import Counter, defaultdict
from typing import Any

from darts_parallel.graph._programme import ProgrammeAnswer
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
SPELLED = {"R": "Replicate", VARYING: "Replicate", SLICED: "Replicate", "P": "Partial"}
STYLES = {"columns": "colwise", "inner": "rowwise"}
"""Words of transformers for what a linear layer splits."""


def spelled(state: str) -> str:
    """Return a placement as DTensor writes it."""
    return SPELLED.get(state) or f"Shard({state[1:]})"


def claim(programme: ProgrammeAnswer) -> str:
    """Say in one sentence what is proven of the written plan."""
    if programme.proven:
        kind = "the integer programme is solved"
        if programme.tight:
            kind = "the linear relaxation is whole"
        return f"no plan of the space is faster ({kind})"
    gap = float("inf")
    if programme.lp_seconds:
        gap = programme.seconds / programme.lp_seconds - 1.0
    return (
        f"at most {PERCENT * gap:.2f} % above the linear relaxation "
        "(the integer programme ran out of time)"
    )


def graph_dict(planned: PlannedGraph, template: GraphPlan | None = None) -> dict[str, Any]:
    """Return the content of `graph.json`."""
    plan = planned.plan
    found: dict[str, Any] = {
        "mesh": list(plan.space.mesh.ranks),
        "cluster": plan.space.mesh.cluster.name,
    }
    operators = planned.graph.operators
    found["operators"] = [_operator(plan, op) for op in operators]
    found["collectives"] = [one.entry() for one in plan.collectives]
    for key, name in DESCENT.items():
        found[key] = getattr(planned.descent, name, None)
    found |= _proof(planned)
    found |= _counts(planned)
    found["plan"] = summary(plan)
    found["template"] = None if template is None else summary(template)
    found["tp_plan"] = tensor_parallel_plan(planned)
    return found


def _proof(planned: PlannedGraph) -> dict[str, Any]:
    """Return the results of the programme as `graph.json` lists them."""
    programme = planned.programme
    return {
        "improved_s": planned.plan.seconds,
        "lp_s": programme.lp_seconds,
        "claim": claim(programme),
        "proven": programme.proven,
        "programme_s": programme.solve_seconds,
    }


def _counts(planned: PlannedGraph) -> dict[str, Any]:
    """Return sizes of the search as `graph.json` lists them."""
    graph = planned.graph
    unknown = sorted({op.op for op in planned.unknown})
    groups = planned.plan.space.groups
    return {
        "unknown_operators": unknown,
        "unknown_count": len(planned.unknown),
        "computing_operators": len(graph.computing),
        "choice_groups": len(groups),
        "capture_s": graph.seconds,
    }


def _operator(plan: GraphPlan, op: GraphOperator) -> dict[str, Any]:
    """Return an operator as `graph.json` lists it."""
    choice = plan.choice(op)
    names = ("name", "op", "module", "target")
    found: dict[str, Any] = {}
    for name in names:
        found[name] = getattr(op, name)
    first = (op.outputs or op.inputs)[0]
    value = plan.space.graph.values[first]
    found["shape"] = list(value.shape)
    found["split"] = list(choice.labels)
    found["merged"] = [one.name for one in plan.merged(op)]
    found["inputs"] = [list(map(spelled, state)) for state in choice.inputs]
    found["weights_first"] = bool(choice.chained)
    found["outputs"] = [list(map(spelled, state)) for state in choice.outputs]
    found["seconds"] = choice.seconds
    return found


def summary(plan: GraphPlan) -> dict[str, float]:
    """Return seconds of a step, number of collectives and their bytes."""
    sizes = [one.step.bytes for one in plan.collectives]
    found: dict[str, float] = {"seconds": plan.seconds}
    found["collectives"] = len(sizes)
    found["bytes"] = sum(sizes)
    return found


def report_lines(planned: PlannedGraph, template: GraphPlan | None = None) -> list[str]:
    """Return the report: what was captured, what splits, what communicates, what is proven."""
    plan = planned.plan
    lines = [_capture_line(planned)]
    if unknown := Counter(op.op for op in planned.unknown).most_common():
        names = ", ".join(f"{name} ({count})" for name, count in unknown)
        lines.append(f"not split (operator not supported): {names}")
    lines += _split_lines(plan)
    lines += _merged_lines(plan)
    lines += _collective_lines(plan)
    lines.append(_plan_line(planned))
    if template is not None:
        lines.append(_template_line(plan, template))
    if planned.descent is not None:
        lines.append(_descent_line(plan, planned.descent))
    return lines


def _capture_line(planned: PlannedGraph) -> str:
    mesh = planned.plan.space.mesh
    computing = planned.graph.computing
    kinds = {op.op for op in computing}
    ranks = " x ".join(map(str, mesh.ranks))
    graph = planned.graph
    found = f"captured: {len(computing)} operators of {len(kinds)} kinds in {graph.seconds:.1f} s"
    choices = len(planned.plan.space.groups)
    return f"{found}; {choices} choices on a mesh of {ranks} ({mesh.cluster.name})"


def _plan_line(planned: PlannedGraph) -> str:
    programme = planned.programme
    word = "proven" if programme.proven else "not proven"
    seconds = f"{MILLI * planned.plan.seconds:.4f} ms per step, forward and backward"
    bound = f"bound {MILLI * programme.lp_seconds:.4f} ms"
    size = f"{programme.variables} variables, {programme.solve_seconds:.1f} s"
    return f"{seconds}; {word}: {claim(programme)}; {bound}, {size}"


def _template_line(plan: GraphPlan, template: GraphPlan) -> str:
    known = summary(template)
    own = summary(plan)
    sizes = []
    for one in (known, own):
        sizes.append(f"{one['collectives']} collectives of {one['bytes'] / MIB:.2f} MiB")
    seconds = f"{MILLI * known['seconds']:.4f} ms"
    return f"Megatron's template: {seconds}, {sizes[0]}, where this plan has {sizes[1]}"


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
    rows = []
    for number, group in enumerate(plan.space.groups):
        if group.operators[0].op not in (*SOURCES, OUTPUT, RELAY):
            seconds = plan.space.seconds[number][plan.assignment[number]]
            rows.append((float(seconds), group.operators))
    total = sum(seconds for seconds, _ in rows) or 1.0
    rows.sort(key=lambda row: -row[0])
    lines = []
    for seconds, operators in rows[:LISTED]:
        op = operators[0]
        times = f" x {len(operators)}" if len(operators) > 1 else ""
        splits = ", ".join(plan.choice(op).labels)
        share = PERCENT * seconds / total
        lines.append(f"  {share:5.1f} % {op.op}{times} ({op.module or op.name}): splits {splits}")
    return lines


def _merged_lines(plan: GraphPlan) -> list[str]:
    """List the linear operators that are one product, equal ones of repeated blocks in one line."""
    found = set()
    for group in plan.space.groups:
        op = group.operators[0]
        if together := plan.merged(op):
            kind = "weights first" if plan.choice(op).chained else "one product"
            names = ", ".join(one.module or one.name for one in together)
            found.add((kind, names))
    return [f"{kind}: {names}" for kind, names in sorted(found)]


def _collective_lines(plan: GraphPlan) -> list[str]:
    """Sum the collectives by pass, kind and content."""
    sums: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for one in plan.collectives:
        key = one.when, one.step.kind, one.of
        sums[key].append(one.step.bytes)
    lines = []
    for key, sizes in sorted(sums.items(), reverse=True):
        when, kind, of = key
        lines.append(f"{when}: {len(sizes)} x {kind} of {of}s, {sum(sizes) / MIB:.2f} MiB")
    return lines or ["collectives: none"]


def tensor_parallel_plan(planned: PlannedGraph) -> dict[str, str]:
    """Return the linear layers that the last axis splits, in the words of a `tp_plan` of transformers.

    Indices of repeated layers are `*`; layers whose copies differ keep theirs.
    """
    styles = {}
    for op in planned.graph.computing:
        if op.op == "linear" and op.module:
            label = planned.plan.choice(op).labels[-1]
            styles[op.module] = STYLES.get(label, "")
    return merged(styles)


def merged(by_module: dict[str, str]) -> dict[str, str]:
    """Return styles by module with `*` for the indices of repeated ones; empty styles are left out."""
    styles: dict[str, dict[str, str]] = defaultdict(dict)
    for module, style in by_module.items():
        styles[re.sub(r"(?<![^.])\d+(?![^.])", "*", module)][module] = style
    found: dict[str, str] = {}
    for pattern, modules in styles.items():
        if len(set(modules.values())) == 1:
            modules = {pattern: next(iter(modules.values()))}
        found |= modules
    return {name: style for name, style in found.items() if style}
