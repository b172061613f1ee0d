"""The plan as a readable Python file: `parallelize_module` with the styles of its modules."""

from collections import defaultdict
from collections.abc import Collection, Sequence
from itertools import takewhile
from typing import Any

from torch import Tensor, nn

from darts_parallel.graph._layouts import forward_state
from darts_parallel.graph.capture import export
from darts_parallel.graph.plan import PlannedGraph
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


def parallelize(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Split a module's weights over a mesh, and move its tensors as the plan does."""
    return tp.parallelize_module(module, mesh, PLAN)
'''


def plan_script(
    planned: PlannedGraph, module: nn.Module, inputs: Sequence[Tensor], kwargs: dict[str, Any] | None = None
) -> str | None:
    """Return the text of a Python file that applies a plan of one axis with torch's styles.

    Linear layers that read one tensor share what moves it: the module around them prepares its input. None
    where the plan has other collectives than such layers: `PlanRun` runs every plan.

    Args:
        module: The planned one, which is exported again to see how its parts are called.
        inputs, kwargs: As for `plan_module`.
    """
    if len(planned.plan.space.mesh.ranks) > 1:
        return None
    styles: dict[str, str] = {}
    readers: dict[str, list[str]] = defaultdict(list)
    moves = 0
    for op in planned.graph.computing:
        style = STYLES.get((op.op, planned.plan.choice(op).labels[-1]))
        if op.module and op.op in ("linear", "embedding"):
            styles[op.module] = ""
        if op.module and style == COLWISE:
            readers[op.inputs[0]].append(op.module)
        elif op.module and style == ROWWISE:
            out = _place(planned.plan.demands(op.outputs[0]))
            whole = "input_layouts=Replicate(), " if op.op == "embedding" else ""
            styles[op.module] = f"tp.{ROWWISE}({whole}output_layouts={out})"
            moves += 2 if out.startswith("Shard") else 1
    around = {name: _around(paths) for name, paths in readers.items() if len(paths) > 1}
    called = _called(module, set(around.values()), inputs, kwargs or {})
    for name, paths in readers.items():
        place = _place([planned.plan.produced(name)])
        moves += 2 if place.startswith("Shard") else 1
        style = f"tp.{COLWISE}()" if name in around else f"tp.{COLWISE}(input_layouts={place})"
        styles |= dict.fromkeys(paths, style)
        if around.get(name) in called:
            styles[around[name]] = called[around[name]].format(place=place)
    if moves != len(planned.plan.collectives):
        return None
    entries = "".join(f'    "{path}": {style},\n' for path, style in sorted(merged(styles).items()))
    return FILE.format(ranks=planned.plan.space.mesh.ranks[-1], entries=entries)


def _place(states: Sequence[tuple[str, ...]]) -> str:
    """Spell the placement that the first consumer wants (a partial sum is reduced for it)."""
    word = spelled(forward_state(states[0])[-1])
    return word if word.startswith("Shard") else "Replicate()"


def _around(paths: Sequence[str]) -> str:
    """Return the path of the smallest module that holds all of some modules."""
    levels = zip(*(path.split(".")[:-1] for path in paths), strict=False)
    return ".".join(names[0] for names in takewhile(lambda names: len(set(names)) == 1, levels))


def _called(
    module: nn.Module, paths: Collection[str], inputs: Sequence[Tensor], kwargs: dict[str, Any]
) -> dict[str, str]:
    """Call a module once; return for some of its parts how a style prepares their first tensor."""
    found: dict[str, str] = {}

    def look(path: str, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        tensors = [name for name, value in named.items() if isinstance(value, Tensor)]
        if args and isinstance(args[0], Tensor):
            rest = " None," * (len(args) - 1)
            found[path] = _prepare("", f"({{place}},{rest})", f"(Replicate(),{rest})")
        elif tensors:
            name = tensors[0]
            found[path] = _prepare("kwarg_", f'{{{{"{name}": {{place}}}}}}', f'{{{{"{name}": Replicate()}}}}')

    handles = [
        part.register_forward_pre_hook(
            lambda _, args, named, path=path: look(path, args, named), with_kwargs=True
        )
        for path, part in module.named_modules() if path in paths
    ]  # fmt: skip
    try:
        export(module, inputs, kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _prepare(kind: str, layouts: str, desired: str) -> str:
    return f"tp.PrepareModuleInput(input_{kind}layouts={layouts}, desired_input_{kind}layouts={desired})"
