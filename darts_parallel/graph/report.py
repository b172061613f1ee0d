"""Write and print a plan: `graph.json`, the report."""

import re
from collections import Counter, defaultdict
from typing import Any

from darts_parallel.graph._rules import SLICED, VARYING
from darts_parallel.graph.operators import OUTPUT, RELAY, SOURCES, GraphOperator
from darts_parallel.graph.plan import GraphPlan, PlannedGraph

MIB = 2.0**20
DESCENT = {
    "raw_s": "seconds",
    "rounded_s": "rounded_seconds",
    "raw_fits": "fits",
    "descent_s": "search_seconds",
}
"""Names in `graph.json` of the fields of `DescentAnswer`."""
SPELLED = {"R": "Replicate", VARYING: "Replicate", SLICED: "Replicate", "P": "Partial"}


def spelled(state: str) -> str:
    """Return a placement as DTensor writes it."""
    return SPELLED.get(state) or f"Shard({state[1:]})"


def claim(planned: PlannedGraph) -> str:
    """Say in one sentence what is proven of the written plan."""
    programme = planned.programme
    if programme.proven:
        kind = (
            "the linear relaxation is whole"
            if programme.tight
            else "the integer programme is solved"
        )
        return f"no plan of the space is faster ({kind})"
    gap = programme.seconds / programme.lp_seconds - 1.0 if programme.lp_seconds else float("inf")
    return f"at most {100.0 * gap:.2f} % above the linear relaxation (the integer programme ran out of time)"


def graph_dict(planned: PlannedGraph, template: GraphPlan | None = None) -> dict[str, Any]:
    """Return the content of `graph.json`."""
    plan, programme, descent = planned.plan, planned.programme, planned.descent
    operators = [_operator(plan, op) for op in planned.graph.operators]
    found = {key: getattr(descent, name, None) for key, name in DESCENT.items()}
    return {
        "mesh": list(plan.space.mesh.ranks),
        "cluster": plan.space.mesh.cluster.name,
        "operators": operators,
        "collectives": [one.entry() for one in plan.collectives],
        **found,
        "improved_s": plan.seconds,
        "lp_s": programme.lp_seconds,
        "claim": claim(planned),
        "proven": programme.proven,
        "unknown_operators": sorted({op.op for op in planned.unknown}),
        "unknown_count": len(planned.unknown),
        "computing_operators": len(planned.graph.computing),
        "choice_groups": len(plan.space.groups),
        "plan": summary(plan),
        "template": None if template is None else summary(template),
        "tp_plan": tensor_parallel_plan(planned),
        "capture_s": planned.graph.seconds,
        "programme_s": programme.solve_seconds,
    }


def _operator(plan: GraphPlan, op: GraphOperator) -> dict[str, Any]:
    """Return an operator as `graph.json` lists it."""
    choice, shape = plan.choice(op), plan.space.graph.values[(op.outputs + op.inputs)[0]].shape
    inputs, outputs = (
        [list(map(spelled, s)) for s in states] for states in (choice.inputs, choice.outputs)
    )
    return {
        "name": op.name,
        "op": op.op,
        "module": op.module,
        "target": op.target,
        "shape": list(shape),
        "split": list(choice.labels),
        "merged": [one.name for one in plan.merged(op)],
        "inputs": inputs,
        "weights_first": bool(choice.chained),
        "outputs": outputs,
        "seconds": choice.seconds,
    }


def summary(plan: GraphPlan) -> dict[str, float]:
    """Return seconds of a step, number of collectives and their bytes."""
    sizes = [one.step.bytes for one in plan.collectives]
    return {"seconds": plan.seconds, "collectives": len(sizes), "bytes": sum(sizes)}


def report_lines(planned: PlannedGraph, template: GraphPlan | None = None) -> list[str]:
    """Return the report: what was captured, what splits, what communicates, what is proven."""
    plan, programme, descent = planned.plan, planned.programme, planned.descent
    graph, mesh, computing = planned.graph, plan.space.mesh, planned.graph.computing
    lines = [
        f"captured: {len(computing)} operators of {len({op.op for op in computing})} kinds in "
        f"{graph.seconds:.1f} s; {len(plan.space.groups)} choices on a mesh of "
        f"{' x '.join(map(str, mesh.ranks))} ({mesh.cluster.name})"
    ]
    if unknown := Counter(op.op for op in planned.unknown).most_common():
        names = ", ".join(f"{name} ({count})" for name, count in unknown)
        lines.append(f"replicated, since they have no rule: {names}")
    lines += [*_split_lines(plan), *_merged_lines(plan), *_collective_lines(plan)]
    lines.append(
        f"improved: {1e3 * plan.seconds:.4f} ms a step, forward and backward; linear programme: "
        f"{1e3 * programme.lp_seconds:.4f} ms ({programme.variables} variables, "
        f"{programme.solve_seconds:.1f} s); {claim(planned)}"
    )
    if template is not None:
        known, own = summary(template), summary(plan)
        lines.append(
            f"Megatron's template: {1e3 * known['seconds']:.4f} ms, {known['collectives']} collectives of "
            f"{known['bytes'] / MIB:.2f} MiB, where this plan has {own['collectives']} of "
            f"{own['bytes'] / MIB:.2f} MiB"
        )
    if descent is not None:
        above, rounded = (
            100.0 * (one / plan.seconds - 1.0) for one in (descent.seconds, descent.rounded_seconds)
        )
        fits = "" if descent.fits else ", over the memory"
        lines.append(
            f"raw: {1e3 * descent.seconds:.4f} ms, {above:.2f} % above ({rounded:.2f} % before coordinate "
            f"descent{fits}), in {descent.search_seconds:.1f} s"
        )
    return lines


def _split_lines(plan: GraphPlan) -> list[str]:
    """List what the operators with most seconds split, equal ones of repeated blocks in one line."""
    costs = (
        float(seconds[k]) for k, seconds in zip(plan.assignment, plan.space.seconds, strict=True)
    )
    groups = zip(costs, (group.operators for group in plan.space.groups), strict=True)
    rows = [(own, ops) for own, ops in groups if ops[0].op not in (*SOURCES, OUTPUT, RELAY)]
    total, lines = sum(own for own, _ in rows) or 1.0, []
    for seconds, (op, *others) in sorted(rows, key=lambda row: -row[0])[:12]:
        times, splits = f" x {1 + len(others)}" if others else "", ", ".join(plan.choice(op).labels)
        lines.append(
            f"  {100.0 * seconds / total:5.1f} % {op.op}{times} ({op.module or op.name}): splits {splits}"
        )
    return lines


def _merged_lines(plan: GraphPlan) -> list[str]:
    """List the linear operators that are one product, equal ones of repeated blocks in one line."""
    found = set()
    for op in (group.operators[0] for group in plan.space.groups):
        kind = "weights first" if plan.choice(op).chained else "one product"
        if ops := plan.merged(op):
            found.add(f"{kind}: {', '.join(one.module or one.name for one in ops)}")
    return sorted(found, key=lambda line: line.partition(": ")[::2])


def _collective_lines(plan: GraphPlan) -> list[str]:
    """Sum the collectives by pass, kind and what they carry."""
    sums: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for one in plan.collectives:
        sums[one.when, one.step.kind, one.of].append(one.step.bytes)
    return [
        f"{when}: {len(sizes)} x {kind} of {of}s, {sum(sizes) / MIB:.2f} MiB"
        for (when, kind, of), sizes in sorted(sums.items(), reverse=True)
    ] or ["collectives: none"]


STYLES = {"columns": "colwise", "inner": "rowwise"}
"""Words of transformers for what a linear layer splits."""


def tensor_parallel_plan(planned: PlannedGraph) -> dict[str, str]:
    """Return the linear layers that the last axis splits, in the words of a `tp_plan` of transformers.

    Indices of repeated layers are `*`; layers whose copies differ keep theirs.
    """
    linear = [op for op in planned.graph.computing if op.op == "linear" and op.module]
    return merged({op.module: STYLES.get(planned.plan.choice(op).labels[-1], "") for op in linear})


def merged(by_module: dict[str, str]) -> dict[str, str]:
    """Return styles by module with `*` for the indices of repeated ones; empty styles are left out."""
    styles: dict[str, dict[str, str]] = defaultdict(dict)
    for module, style in by_module.items():
        styles[re.sub(r"(?<![^.])\d+(?![^.])", "*", module)][module] = style
    found: dict[str, str] = {}
    for pattern, modules in styles.items():
        alike = set(modules.values())
        found |= dict.fromkeys([pattern], *alike) if len(alike) == 1 else modules
    return {name: style for name, style in found.items() if style}
