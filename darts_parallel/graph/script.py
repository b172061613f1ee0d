"""The plan as a readable Python file: `parallelize_module` with torch's styles, where these say it."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os.path import commonpath

from darts_parallel.graph._choices import OperatorChoice
from darts_parallel.graph._states import State, forward_state
from darts_parallel.graph.execute import operators_script
from darts_parallel.graph.operators import (
    INPUT,
    OUTPUT,
    PARAMETER,
    RELAY,
    FirstTensor,
    GraphOperator,
)
from darts_parallel.graph.plan import GraphPlan
from darts_parallel.graph.report import merged, spelled

COLWISE, ROWWISE = "ColwiseParallel", "RowwiseParallel"
WHOLE = "Replicate()"
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


@dataclass
class Styles:
    """Styles by module, and the collectives that they bring."""

    by_module: dict[str, str] = field(default_factory=dict)
    moves: int = 0

    @property
    def styles(self) -> list[str]:
        """All styles."""
        return list(self.by_module.values())

    def add(
        self,
        paths: Sequence[str],
        style: str,
        moves: int = 0,
    ) -> None:
        """Give modules a style that brings some collectives."""
        self.by_module |= dict.fromkeys(paths, style)
        self.moves += moves


def plan_script(plan: GraphPlan) -> str:
    """Return the text of a Python file that runs a plan: with torch's styles, or operator by operator.

    Styles serve one axis, where they bring the plan's collectives and no others; the module's own code then
    sees the shapes of a rank's parts.
    """
    if not _may_have_styles(plan):
        return operators_script(plan)
    norms = _norms(plan)
    styles = Styles()
    _add_reduced(plan, styles)
    for name, paths in _column_readers(plan).items():
        _add_columns(plan, styles, name, paths, norms)
    first = _first_input(plan)
    last = _last_output(plan)
    # gradients of norms on shards are summed when they are read, not in the backward pass
    late = [op.name for op in plan.space.graph.of_kind(PARAMETER) if op.owner in norms]
    listed = sum(one.name not in late for one in plan.collectives)
    if styles.moves + first.moves + last.moves != listed:
        return operators_script(plan)
    entries = ""
    by_path = merged(styles.by_module | norms)
    for path, style in sorted(by_path.items()):
        entries += f'    "{path}": {style},\n'
    ends = ", ".join([*first.styles, *last.styles])
    ranks = plan.space.mesh.ranks[-1]
    return FILE.format(ranks=ranks, entries=entries, ends=ends)


def _may_have_styles(plan: GraphPlan) -> bool:
    """Return whether a plan has one axis, no merged products and no slices that are gathered again."""
    sliced = any(one.again for one in plan.collectives)
    joined = any(map(plan.merged, plan.space.graph.operators))
    return len(plan.space.mesh.ranks) == 1 and not sliced and not joined


def _style(plan: GraphPlan, op: GraphOperator) -> str:
    """Return the style of a module's weight operator; it may be empty."""
    key = op.op, plan.choice(op).labels[-1]
    return STYLES.get(key, "") if op.module else ""


def _add_reduced(plan: GraphPlan, styles: Styles) -> None:
    """Add the styles of products that sum over ranks; other products get an empty one."""
    for op in plan.space.graph.computing:
        if op.module and op.op in ("linear", "embedding"):
            styles.add([op.module], "")
        if _style(plan, op) == ROWWISE:
            out = _place(plan.demands(op.outputs[0]))
            given = f"input_layouts={WHOLE}, " if op.op == "embedding" else ""
            style = f"tp.{ROWWISE}({given}output_layouts={out})"
            styles.add([op.module], style, 1 if out == WHOLE else 2)


def _column_readers(plan: GraphPlan) -> Mapping[str, list[str]]:
    """Return the modules that split columns, by the value that they read."""
    readers = defaultdict[str, list[str]](list)
    for op in plan.space.graph.computing:
        if _style(plan, op) == COLWISE:
            readers[op.inputs[0]].append(op.module)
    return readers


def _add_columns(
    plan: GraphPlan,
    styles: Styles,
    name: str,
    paths: list[str],
    norms: Mapping[str, str],
) -> None:
    """Add the styles of the modules that read a value and split columns."""
    graph = plan.space.graph
    maker = graph.maker(name)
    alone = len(paths) == len(graph.consumers[name])
    read = maker.inputs[0] if maker.op == RELAY and alone else name  # nobody else sees the copy
    place = _place([plan.produced(read)])
    each = 1 if place == WHOLE else 2
    parents = [f"/{path}".replace(".", "/").rpartition("/")[0] or "/" for path in paths]
    around = commonpath(parents)[1:].replace("/", ".")
    """The innermost module around all of them."""
    several = len(paths) > 1
    own_module = maker.module not in ("", *norms)
    inside = any(_inside(path, maker.module) for path in paths)
    if several and around in graph.calls and not _inside(maker.module, around):
        styles.add(paths, f"tp.{COLWISE}()")
        style = _prepared(graph.calls[around], place, WHOLE)
        styles.add([around], style, each)
    elif several and alone and each == 1 and own_module and not inside:
        # readers of one DTensor sum their gradients before these are reduced
        styles.add(paths, f"tp.{COLWISE}()")
        layouts = f"output_layouts={place}, desired_output_layouts={place}, use_local_output=False"
        styles.add([maker.module], f"tp.PrepareModuleOutput({layouts})", each)
    else:
        styles.add(paths, f"tp.{COLWISE}(input_layouts={place})", each * len(paths))


def _norms(plan: GraphPlan) -> dict[str, str]:
    """Return the styles of modules with weights that work on shards of a dimension behind the first."""
    graph = plan.space.graph
    owners = {op.owner for op in graph.of_kind(PARAMETER)}
    parts = defaultdict[str, list[OperatorChoice]](list)
    for op in graph.computing:
        if op.module in owners and graph.gradients(op.outputs):
            parts[op.module].append(plan.choice(op))
    found = {}
    for path, choices in parts.items():
        label, *others = {choice.labels[-1] for choice in choices}
        ends = choices[0].inputs[0][-1], choices[-1].outputs[0][-1]
        if not others and label != "d0" and set(ends) == {label.replace("d", "S")}:
            found[path] = f"tp.SequenceParallel(sequence_dim={label[1:]}, use_local_output=True)"
    return found


def _first_input(plan: GraphPlan) -> Styles:
    """Return the style that splits the module's first input, and its collectives."""
    graph = plan.space.graph
    styles = Styles()
    given = graph.of_kind(INPUT)
    name = given[0].outputs[0] if given else ""
    used = name in graph.consumers and graph.values[name].needs_grad
    if not used or "" not in graph.calls:
        return styles
    made = _place([plan.produced(name)])
    reader, _ = graph.consumers[name][0]
    copy = reader.outputs[0] if reader.op == RELAY else name
    target, *others = {_place([state]) for state in plan.demands(copy)}
    if target == WHOLE:
        target = _place([plan.produced(copy)])
    if made != target and not others:
        style = _prepared(graph.calls[""], made, target, ", use_local_output=True")
        styles.add([""], style, sum(one.name in (name, copy) for one in plan.collectives))
    return styles


def _last_output(plan: GraphPlan) -> Styles:
    """Return the style that joins the module's one output, and its collectives."""
    styles = Styles()
    output, *others = plan.space.graph.of_kind(OUTPUT)
    name = output.inputs[0]
    made = _place([plan.produced(name)])
    wanted = _place(plan.choice(output).inputs)
    if made != wanted and not others:
        style = f"tp.PrepareModuleOutput(output_layouts={made}, desired_output_layouts={wanted})"
        styles.add([""], style, sum(one.name == name for one in plan.collectives))
    return styles


def _place(states: Sequence[State]) -> str:
    """Spell the placement that the first consumer wants (a partial sum is reduced for it)."""
    word = spelled(forward_state(states[0])[-1])
    return word if word.startswith("Shard") else WHOLE


def _inside(module: str, path: str) -> bool:
    """Return whether a module is another one, or a part of it; all are parts of the whole."""
    return not path or f"{module}.".startswith(f"{path}.")


def _prepared(
    called: FirstTensor,
    given: str,
    wanted: str,
    more: str = "",
) -> str:
    """Return the style that brings the first tensor of a call from one placement to another."""
    if called.name:
        layouts = f'input_kwarg_layouts={{"{called.name}": {given}}}'
        desired = f'desired_input_kwarg_layouts={{"{called.name}": {wanted}}}'
    else:
        others = " None," * (called.positional - 1)
        layouts = f"input_layouts=({given},{others})"
        desired = f"desired_input_layouts=({wanted},{others})"
    return f"tp.PrepareModuleInput({layouts}, {desired}{more})"
