"""The plan as a readable Python file: `parallelize_module` with the styles of its modules."""

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from itertools import takewhile
from typing import Any

from torch import Tensor, nn

from darts_parallel.graph._layouts import State, forward_state
from darts_parallel.graph.capture import export
from darts_parallel.graph.operators import INPUT, OUTPUT, PARAMETER, RELAY, GraphOperator
from darts_parallel.graph.plan import GraphPlan, PlannedGraph
from darts_parallel.graph.report import merged, spelled

COLWISE, ROWWISE = "ColwiseParallel", "RowwiseParallel"
STYLES = {("linear", "columns"): COLWISE, ("linear", "inner"): ROWWISE, ("embedding", "vocabulary"): ROWWISE}
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


def plan_script(
    planned: PlannedGraph, module: nn.Module, inputs: Sequence[Tensor], kwargs: dict[str, Any] | None = None
) -> str | None:
    """Return the text of a Python file that applies a plan of one axis with torch's styles.

    None where the plan has other collectives than the styles bring: `PlanRun` runs every plan. The module's
    own code sees the shapes of a rank's parts.

    Args:
        module: The planned one, which is exported again to see how its parts are called.
        inputs, kwargs: As for `plan_module`.
    """
    plan = planned.plan
    if len(plan.space.mesh.ranks) > 1:
        return None
    styles, readers, moves = _products(plan)
    norms = _norms(plan)
    around = {name: _around(plan, name, paths) for name, paths in readers.items() if len(paths) > 1}
    called = _called(module, set(around.values()), inputs, kwargs or {})
    for name, paths in readers.items():
        outer = around.get(name, "")
        more, moved = _columns(plan, name, paths, norms, (outer, called.get(outer)))
        styles, moves = styles | more, moves + moved
    ends, ended = _ends(plan, _first_tensor(inputs, kwargs or {}))
    # gradients of norms on shards are summed when they are read, not in the backward pass
    late = {op.name for op in plan.space.graph.operators
            if op.op == PARAMETER and op.target.rpartition(".")[0] in norms}  # fmt: skip
    if moves + ended != sum(one.name not in late for one in plan.collectives):
        return None
    entries = "".join(f'    "{path}": {style},\n' for path, style in sorted(merged(styles | norms).items()))
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
    plan: GraphPlan,
    name: str,
    paths: list[str],
    norms: Collection[str],
    around: tuple[str, tuple[str, int] | None],
) -> tuple[dict[str, str], int]:
    """Return the styles of the modules that read a value and split columns, and their collectives.

    Args:
        norms: Modules that work on shards.
        around: The module around them and how it is called; None: they are moved one by one.
    """
    maker = plan.space.graph.producers[name][0]
    place, alone = _place([plan.produced(name)]), len(paths) == len(plan.space.graph.consumers[name])
    if maker.op == RELAY and alone:  # nobody else sees the copy
        place = _place([plan.produced(maker.inputs[0])])
    each = 2 if place.startswith("Shard") else 1
    if around[1] is not None:
        prepared = {around[0]: _prepared(around[1], place, "Replicate()")}
        return dict.fromkeys(paths, f"tp.{COLWISE}()") | prepared, each
    own = maker.module not in ("", *norms) and not any(map(_inside(maker.module), paths))
    if len(paths) > 1 and alone and own and each == 1:
        # readers of one DTensor sum their gradients before these are reduced
        layouts = f"output_layouts={place}, desired_output_layouts={place}, use_local_output=False"
        made = {maker.module: f"tp.PrepareModuleOutput({layouts})"}
        return dict.fromkeys(paths, f"tp.{COLWISE}()") | made, each
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


def _ends(plan: GraphPlan, called: tuple[str, int] | None) -> tuple[list[str], int]:
    """Return the styles that split the module's first input and join its output, and their collectives."""
    graph, styles, moves = plan.space.graph, list[str](), 0
    for op in graph.operators:
        name = (op.outputs + op.inputs)[0]
        made = _place([plan.produced(name)])
        if op.op == INPUT and called and not styles and graph.values[name].needs_grad:
            reader = graph.consumers[name][0][0]
            copy = reader.outputs[0] if reader.op == RELAY else name
            target, *others = dict.fromkeys(_place([state]) for state in plan.demands(copy))
            target = _place([plan.produced(copy)]) if target == "Replicate()" else target
            if made != target and not others:
                styles.append(_prepared(called, made, target))
                moves += sum(one.name in (name, copy) for one in plan.collectives)
        elif op.op == OUTPUT and made != (wanted := _place([plan.choice(op).inputs[0]])):
            layouts = f"output_layouts={made}, desired_output_layouts={wanted}"
            styles.append(f"tp.PrepareModuleOutput({layouts})")
            moves += sum(one.name == name for one in plan.collectives)
    return styles, moves


def _place(states: Sequence[State]) -> str:
    """Spell the placement that the first consumer wants (a partial sum is reduced for it)."""
    word = spelled(forward_state(states[0])[-1])
    return word if word.startswith("Shard") else "Replicate()"


def _around(plan: GraphPlan, value: str, paths: Sequence[str]) -> str:
    """Return the path of the smallest module that holds all readers of a value and not its producer."""
    levels = zip(*(path.split(".")[:-1] for path in paths), strict=False)
    found = ".".join(names[0] for names in takewhile(lambda names: len(set(names)) == 1, levels))
    return "" if _inside(found)(plan.space.graph.producers[value][0].module) else found


def _inside(path: str) -> Callable[[str], bool]:
    """Return whether a module is another one, or a part of it."""
    return lambda module: f"{module}.".startswith(f"{path}.")


def _called(
    module: nn.Module, paths: Collection[str], inputs: Sequence[Tensor], kwargs: dict[str, Any]
) -> dict[str, tuple[str, int]]:
    """Call a module once; return how some of its parts get their first tensor (`_first_tensor`)."""
    found: dict[str, tuple[str, int]] = {}

    def look(path: str, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        if (first := _first_tensor(args, named)) is not None:
            found[path] = first

    handles = [
        part.register_forward_pre_hook(
            lambda _, args, named, path=path: look(path, args, named), with_kwargs=True
        )
        for path, part in module.named_modules() if path and path in paths
    ]  # fmt: skip
    try:
        export(module, inputs, kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _first_tensor(args: Sequence[Any], named: dict[str, Any]) -> tuple[str, int] | None:
    """Return the name of the first tensor of a call, empty for a positional one, and the positional ones."""
    if args and isinstance(args[0], Tensor):
        return "", len(args)
    return next(((name, len(args)) for name, value in named.items() if isinstance(value, Tensor)), None)


def _prepared(called: tuple[str, int], given: str, wanted: str) -> str:
    """Return the style that brings the first tensor of a call from one placement to another."""
    name, count = called
    kind, form = ("kwarg_", f'{{{{"{name}": {{}}}}}}') if name else ("", f"({{}},{' None,' * (count - 1)})")
    layouts, desired = (form.format(place) for place in (given, wanted))
    return f"tp.PrepareModuleInput(input_{kind}layouts={layouts}, desired_input_{kind}layouts={desired})"
