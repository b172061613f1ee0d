"""The plan as a readable Python file: `parallelize_module` with torch's styles, where these say it."""

from collections import defaultdict
from collections.abc import Collection, Sequence
from itertools import takewhile

from darts_parallel.graph._layouts import State, forward_state
from darts_parallel.graph.execute import operators_script
from darts_parallel.graph.operators import INPUT, OUTPUT, PARAMETER, RELAY, GraphOperator
from darts_parallel.graph.plan import GraphPlan
from darts_parallel.graph.report import merged, spelled

COLWISE, ROWWISE = "ColwiseParallel", "RowwiseParallel"
STYLES = {
    ("linear", "columns"): COLWISE,
    ("linear", "inner"): ROWWISE,
    ("embedding", "vocabulary"): ROWWISE,
}
FILE = '''\
"""Tensor parallelism on {ranks} ranks by torch's own styles; written by darts-parallel.

    mesh = torch.distributed.device_mesh.init_device_mesh("cuda", ({ranks},))
    module = parallelize(module, mesh)
"""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor import parallel as tp

PLAN = {{
{entries}}}
"""Styles by module; `*` stands for every repeated block."""
ENDS = [{ends}]
"""What moves the inputs and outputs of the whole module."""


def parallelize(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Split a module's weights over a mesh, and move its tensors as the plan does."""
    for style in (PLAN, *ENDS):
        tp.parallelize_module(module, mesh, style)
    return module
'''


def plan_script(plan: GraphPlan) -> str:
    """Return the text of a Python file that runs a plan: with torch's styles, or operator by operator.

    Styles serve one axis, where they bring the plan's collectives and no others; the module's own code then
    sees the shapes of a rank's parts.
    """
    sliced = any(one.again for one in plan.collectives)
    if (
        sliced
        or len(plan.space.mesh.ranks) > 1
        or any(map(plan.merged, plan.space.graph.operators))
    ):
        return operators_script(plan)
    styles, readers, moves = _products(plan)
    norms = _norms(plan)
    for name, paths in readers.items():
        more, moved = _columns(plan, name, paths, norms)
        styles, moves = styles | more, moves + moved
    ends, ended = _ends(plan)
    # gradients of norms on shards are summed when they are read, not in the backward pass
    late = {
        op.name
        for op in plan.space.graph.operators
        if op.op == PARAMETER and op.target.rpartition(".")[0] in norms
    }
    if moves + ended != sum(one.name not in late for one in plan.collectives):
        return operators_script(plan)
    entries = "".join(
        f'    "{path}": {style},\n' for path, style in sorted(merged(styles | norms).items())
    )
    return FILE.format(ranks=plan.space.mesh.ranks[-1], entries=entries, ends=", ".join(ends))


def _products(plan: GraphPlan) -> tuple[dict[str, str], dict[str, list[str]], int]:
    """Return the styles of reduced products, the modules that split columns by what they read, and moves."""
    styles, readers, moves = dict[str, str](), defaultdict[str, list[str]](list), 0
    for op in plan.space.graph.computing:
        style = STYLES.get((op.op, plan.choice(op).labels[-1]))
        if op.module and op.op in ("linear", "embedding"):
            styles[op.module] = ""
        if op.module and style == COLWISE:
            readers[op.inputs[0]].append(op.module)
        elif op.module and style == ROWWISE:
            out = _place(plan.demands(op.outputs[0]))
            whole = "input_layouts=Replicate(), " if op.op == "embedding" else ""
            styles[op.module] = f"tp.{ROWWISE}({whole}output_layouts={out})"
            moves += 2 if out.startswith("Shard") else 1
    return styles, readers, moves


def _columns(
    plan: GraphPlan, name: str, paths: list[str], norms: Collection[str]
) -> tuple[dict[str, str], int]:
    """Return the styles of the modules that read a value and split columns, and their collectives."""
    graph = plan.space.graph
    maker, alone = graph.producers[name][0], len(paths) == len(graph.consumers[name])
    place = _place([plan.produced(name)])
    if maker.op == RELAY and alone:  # nobody else sees the copy
        place = _place([plan.produced(maker.inputs[0])])
    each = 2 if place.startswith("Shard") else 1
    levels = zip(*(path.split(".")[:-1] for path in paths), strict=False)
    around = ".".join(names[0] for names in takewhile(lambda names: len(set(names)) == 1, levels))
    plain = dict.fromkeys(paths, f"tp.{COLWISE}()")
    if len(paths) > 1 and around in graph.calls and not _inside(maker.module, around):
        return plain | {around: _prepared(graph.calls[around], place, "Replicate()")}, each
    own = maker.module not in ("", *norms) and not any(
        _inside(path, maker.module) for path in paths
    )
    if len(paths) > 1 and alone and own and each == 1:
        # readers of one DTensor sum their gradients before these are reduced
        layouts = f"output_layouts={place}, desired_output_layouts={place}, use_local_output=False"
        return plain | {maker.module: f"tp.PrepareModuleOutput({layouts})"}, each
    return dict.fromkeys(paths, f"tp.{COLWISE}(input_layouts={place})"), each * len(paths)


def _norms(plan: GraphPlan) -> dict[str, str]:
    """Return the styles of modules with weights that work on shards of a dimension behind the first."""
    graph, parts = plan.space.graph, defaultdict[str, list[GraphOperator]](list)
    owners = {op.target.rpartition(".")[0] for op in graph.operators if op.op == PARAMETER}
    for op in graph.computing:
        if op.module in owners and any(graph.values[name].needs_grad for name in op.outputs):
            parts[op.module].append(op)
    found = {}
    for path, ops in parts.items():
        (label, *others) = {plan.choice(op).labels[-1] for op in ops}
        ends = {plan.choice(ops[0]).inputs[0][-1], plan.choice(ops[-1]).outputs[0][-1]}
        if not others and label != "d0" and ends == {label.replace("d", "S")}:
            found[path] = f"tp.SequenceParallel(sequence_dim={label[1:]}, use_local_output=True)"
    return found


def _ends(plan: GraphPlan) -> tuple[list[str], int]:
    """Return the styles that split the first input and join the one output, and their collectives."""
    graph, styles, moves = plan.space.graph, list[str](), 0
    given, returned = ([op for op in graph.operators if op.op == kind] for kind in (INPUT, OUTPUT))
    name = given[0].outputs[0] if given else ""
    if "" in graph.calls and name in graph.consumers and graph.values[name].needs_grad:
        made, reader = _place([plan.produced(name)]), graph.consumers[name][0][0]
        copy = reader.outputs[0] if reader.op == RELAY else name
        target, *others = dict.fromkeys(_place([state]) for state in plan.demands(copy))
        target = _place([plan.produced(copy)]) if target == "Replicate()" else target
        if made != target and not others:
            styles.append(_prepared(graph.calls[""], made, target, ", use_local_output=True"))
            moves += sum(one.name in (name, copy) for one in plan.collectives)
    for op in returned * (len(returned) == 1):
        made, wanted = _place([plan.produced(op.inputs[0])]), _place([plan.choice(op).inputs[0]])
        if made != wanted:
            layouts = f"output_layouts={made}, desired_output_layouts={wanted}"
            styles.append(f"tp.PrepareModuleOutput({layouts})")
            moves += sum(one.name == op.inputs[0] for one in plan.collectives)
    return styles, moves


def _place(states: Sequence[State]) -> str:
    """Spell the placement that the first consumer wants (a partial sum is reduced for it)."""
    word = spelled(forward_state(states[0])[-1])
    return word if word.startswith("Shard") else "Replicate()"


def _inside(module: str, path: str) -> bool:
    """Return whether a module is another one, or a part of it; all are parts of the whole."""
    return not path or f"{module}.".startswith(f"{path}.")


def _prepared(called: tuple[str, int], given: str, wanted: str, more: str = "") -> str:
    """Return the style that brings the first tensor of a call from one placement to another."""
    name, count = called
    kind, form = (
        ("kwarg_", f'{{{{"{name}": {{}}}}}}') if name else ("", f"({{}},{' None,' * (count - 1)})")
    )
    given, wanted = form.format(given), form.format(wanted)
    return f"tp.PrepareModuleInput(input_{kind}layouts={given}, desired_input_{kind}layouts={wanted}{more})"
