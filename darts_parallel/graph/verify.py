"""Run the file of a plan on processes of this machine, and compare it with one process.

The same choices are written again for two ranks an axis, on the smallest inputs that the module accepts.
Every process runs the file and the whole module, forward and backward, and counts the collectives.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import inf, prod
from typing import Any

import torch
from torch import Tensor, nn

from darts_parallel.cost import Tensors
from darts_parallel.errors import Amounts, DartsParallelError, Entries, UnsupportedError
from darts_parallel.graph._choices import OperatorChoice
from darts_parallel.graph._space import GraphSpace
from darts_parallel.graph._states import Ranks
from darts_parallel.graph.capture import capture_module, load_module, make_inputs
from darts_parallel.graph.execute import plan_script
from darts_parallel.graph.operators import ModuleGraph
from darts_parallel.graph.plan import GraphPlan

Made = tuple[nn.Module, list[Tensor]]
"""A module and its inputs."""
MOST_PARAMETERS = 100_000_000
"""Parameters up to which a plan is run by default."""
MOST_ELEMENTS = 2**27
"""Numbers of all tensors of a graph up to which a plan is run on the inputs that were given."""
TOLERANCE = 1e-4
"""Largest difference over the largest entry: above reordered sums in float32, below any wrong split."""
UNSEEN = 1e-3
"""Share of the largest gradient below which gradients count as rounding errors."""
SEQUENCES = (4, 16, 64)
"""Sizes of a sequence that are tried, the smallest first."""
LARGEST = 1e4
"""Weights from here on are memory that nobody has written."""
NOISE = 0.1
"""Standard deviation of weights that are drawn."""
TIMEOUT_S = 120.0
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
ON_GLOO = {"all_to_all": "all_gather"}
"""Gloo has no all-to-all: DTensor gathers and takes its part."""


class MissingOperatorError(UnsupportedError):
    """The processor of this machine lacks an operator of the file, which the module does without."""


@dataclass(frozen=True)
class PlanCheck:
    """Whether the file of a plan computes the module."""

    verified: bool | None
    """None: it was not run."""
    reason: str

    @property
    def line(self) -> str:
        """A line of the report."""
        if self.verified is None:
            return f"not verified: {self.reason}"
        if self.verified:
            return f"verified: {self.reason}"
        return f"the plan is WRONG, and its file is not written: {self.reason}"


@dataclass(frozen=True)
class FileRun:
    """A file next to the whole module."""

    differences: Amounts
    """Largest differences of outputs, gradients and buffers over their largest entries.

    Infinite where one is missing.
    """
    collectives: dict[str, int]


def verification(
    plan: GraphPlan,
    path: str,
    shapes: Sequence[Any],
    wanted: bool | None,
) -> PlanCheck:
    """Run a plan for two ranks an axis.

    Args:
        path: Where the module is made (`package.file:make_block`).
        shapes: Shapes of its inputs, as the command gets them.
        wanted: None: where the module has at most `MOST_PARAMETERS`.
    """
    parameters = plan.space.graph.elements()
    if wanted is False:
        return PlanCheck(None, "verify=false")
    if wanted is None and parameters > MOST_PARAMETERS:
        reason = f"{parameters:,} parameters are more than {MOST_PARAMETERS:,}; try verify=true"
        return PlanCheck(None, reason)
    check = PlanCheck(None, "no inputs that are small enough have the operators of the plan")
    small_shapes = _small_shapes(shapes, len(plan.space.mesh.ranks))
    try:
        # code may ask for its device: what the meta device captures may not run on the processor
        for small, device in product(small_shapes, ("meta", "cpu")):
            twin = _twin(plan, path, small, device)
            if twin is not None:
                make = partial(_made, path, small, _largest_index(twin.space.graph))
                check = _verified(twin, make, small)
                if check.verified is not None:
                    return check
    except DartsParallelError as error:
        return PlanCheck(None, str(error))
    return check


def _verified(
    twin: GraphPlan,
    make: Callable[[], Made],
    shapes: Sequence[Any],
) -> PlanCheck:
    """Run a small plan on processes of this machine."""
    from darts_parallel.run import Workers

    ranks = twin.space.mesh.ranks
    listed = collectives_on_gloo(twin)
    text = plan_script(twin)
    try:
        with Workers(prod(ranks), timeout_s=TIMEOUT_S) as workers:
            for run in workers.run(run_file, make, text, ranks):
                if fault := _fault(run, listed):
                    return PlanCheck(False, fault)
    except MissingOperatorError as error:
        return PlanCheck(None, str(error))
    except RuntimeError as error:
        return PlanCheck(False, f"the file fails: {error}")
    return PlanCheck(
        True,
        f"outputs, gradients and {sum(listed.values())} collectives of {prod(ranks)} processes on "
        f"inputs={list(map(list, shapes))} are as planned",
    )


def _fault(run: FileRun, listed: dict[str, int]) -> str:
    """Say what a file does wrong; it is empty where nothing is."""
    for name, value in run.differences.items():
        if not value <= TOLERANCE:
            return f"{name} differs by {value:.2g} of its largest entry"
    if listed != run.collectives:
        return f"the file runs the collectives {run.collectives}, the plan has {listed}"
    return ""


def collectives_on_gloo(plan: GraphPlan) -> dict[str, int]:
    """Count the collectives of a plan as gloo runs them."""
    kinds = [one.step.kind for one in plan.collectives]
    return dict(Counter(ON_GLOO.get(kind, kind) for kind in kinds))


def _small_shapes(
    shapes: Sequence[Any],
    axes: int,
) -> Iterator[list[list[Any]]]:
    """Yield shapes of the inputs with small batches and sequences, then the given ones.

    The batch is the first dimension of the first input, the sequence its second one; equal sizes of other
    dimensions become equal ones, but for the last dimension of floating numbers.
    """
    batch, *others = shapes[0]
    sequence = others[0] if len(others) > 1 else batch
    for size in SEQUENCES:
        small = {sequence: size * axes, batch: 2 * axes}
        found = []
        for shape in shapes:
            width = [] if isinstance(shape[-1], str) else shape[-1:]
            own = [min(known, small.get(known, known)) for known in shape[: -len(width) or None]]
            found.append([*own, *width])
        yield found
    yield list(map(list, shapes))


def _twin(
    plan: GraphPlan,
    path: str,
    shapes: Sequence[Any],
    device: str,
) -> GraphPlan | None:
    """Return the choices of a plan for two ranks an axis and other inputs; None where they do not fit."""
    inputs = [torch.empty_like(one, device=device) for one in make_inputs(shapes)]
    try:
        graph = capture_module(load_module(path, device=device), inputs)
    except UnsupportedError:
        return None
    space = plan.space
    mesh = replace(space.mesh, ranks=(2,) * len(space.mesh.ranks))
    own = replace(space, graph=graph, mesh=mesh, width=4)
    large = sum(value.elements for value in graph.values.values()) > MOST_ELEMENTS
    if large or own.group_of != space.group_of:
        return None
    pairs = zip(space.groups, plan.assignment, strict=True)
    chosen = [group.choices[choice] for group, choice in pairs]
    assignment = [_alike(own, number, choice) for number, choice in enumerate(chosen)]
    return None if None in assignment else GraphPlan(own, tuple(assignment))  # type: ignore[arg-type]


def _alike(
    space: GraphSpace,
    group: int,
    choice: OperatorChoice,
) -> int | None:
    """Return the choice of a group that splits the same; None where none does.

    Ranks that outnumber key-value heads have states of their own: there the labels decide.
    """
    found = space.by_states[group].get(choice.states)
    if found is None:
        for k, one in enumerate(space.groups[group].choices):
            if one.labels == choice.labels:
                return k
    return found


def _largest_index(graph: ModuleGraph) -> int:
    """Return the number of rows of the smallest table that whole numbers point into; 2 where none is."""
    rows = []
    for kind, dimension in (("embedding", 0), ("cross_entropy_loss", -1)):
        rows += [graph.shapes(op.inputs)[0][dimension] for op in graph.of_kind(kind)]
    return min(rows, default=2)


def _made(
    path: str,
    shapes: Sequence[Any],
    largest: int,
) -> Made:
    """Make a module on this machine, and random inputs for which it computes numbers.

    Weights that nobody has written are drawn. Constant ones, such as scales of zero or one, get noise: a
    branch that is multiplied by 0 could be wrong unseen.
    """
    torch.manual_seed(0)
    module = load_module(path, device="cpu").eval()
    for tensor in map(Tensor.detach, [*module.parameters(), *module.buffers()]):
        if tensor.is_floating_point() and tensor.numel():
            if not tensor.abs().amax() < LARGEST:
                nn.init.normal_(tensor, std=NOISE)
            elif tensor.amin() == tensor.amax():
                tensor += torch.randn_like(tensor) * NOISE
    for bound in (largest, 2, 1):
        inputs = [_drawn(one, bound) for one in make_inputs(shapes)]
        with suppress(IndexError, RuntimeError):
            # a copy is tried: a module may keep what it computed
            if not any(one.isnan().any() for one in _flat(deepcopy(module)(*inputs))):
                break
    return module, inputs


def _drawn(
    like: Tensor,
    bound: int,
) -> Tensor:
    """Draw an input with the shape and type of another tensor."""
    if like.is_floating_point():
        return torch.randn(like.shape)
    bound = min(bound, 2) if like.dtype == torch.bool else bound
    return torch.randint(bound, like.shape).to(like.dtype)


def run_file(
    make: Callable[[], Made],
    text: str,
    ranks: Ranks,
) -> FileRun:
    """Run the file of a plan and the whole module in this process of a group, and compare them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.debug import CommDebugMode

    file: Entries = {}
    exec(text, file)
    torch.manual_seed(0)
    module, inputs = make()
    module.eval()
    names = tuple(f"axis{axis}" for axis in range(len(ranks)))
    mesh = init_device_mesh("cpu", ranks, mesh_dim_names=names)
    split = file["parallelize"](deepcopy(module), mesh)
    named = zip(file["INPUTS"], map(_leaf, inputs), strict=True)
    given = file["distribute"](dict(named), file["INPUTS"], mesh).values()
    leaves = [_leaf(tensor) for tensor in inputs]
    try:
        expected = list({id(one): one for one in _flat(module(*leaves))}.values())
        if any(one.isnan().any() for one in expected):
            raise ValueError("it computes NaN")
        _backward(expected)
    except Exception as error:  # an answer about the module, whatever it raises
        raise UnsupportedError(f"one process fails: {error}; try verify=false.") from error
    with CommDebugMode() as comms:  # type: ignore[no-untyped-call]
        try:
            outputs = _flat(split(*given))
        except NotImplementedError as error:
            raise MissingOperatorError(f"this processor cannot run the file: {error}") from error
        _backward(outputs)
    differences = _of_outputs(outputs, expected)
    tensors = _numbered(leaves) | dict(module.named_parameters(remove_duplicate=False))
    differences |= _of_gradients(_numbered(given) | dict(split.named_parameters()), tensors)
    for (name, part), tensor in zip(split.named_buffers(), module.buffers(), strict=True):
        differences[f"buffer {name}"] = _difference(_whole(part), tensor, 0.0)
    ran = Counter[str]()
    for kind, count in comms.get_comm_counts().items():
        ran[next(known for known in KINDS if known in str(kind))] += count
    return FileRun(differences, dict(ran))


def _numbered(tensors: Iterable[Tensor]) -> Tensors:
    return {f"input {k}": tensor for k, tensor in enumerate(tensors)}


def _leaf(tensor: Tensor) -> Tensor:
    trained = tensor.is_floating_point() or tensor.is_complex()
    return tensor.detach().clone().requires_grad_(trained)


def _flat(made: Any) -> list[Tensor]:
    """Return the tensors of a result in their order."""
    if isinstance(made, Tensor):
        return [made]
    parts = made.values() if isinstance(made, dict) else made
    nested = isinstance(made, (dict, list, tuple))
    return [tensor for part in parts for tensor in _flat(part)] if nested else []


def _product(tensor: Any) -> Tensor:
    """Return the loss of an output, a random sum of its numbers; of a distributed one this rank's share."""
    from torch.distributed.tensor import DTensor, Replicate

    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    local = torch.view_as_real(local) if local.is_complex() else local
    shape = [*tensor.shape, 2] if tensor.is_complex() else tensor.shape
    factors = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(local.dtype)
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        whole = DTensor.from_local(factors, mesh, [Replicate()] * mesh.ndim, run_check=False)
        factors = whole.redistribute(placements=tensor.placements).to_local()
    return (local * factors).sum().double()


def _whole(tensor: Any) -> Tensor:
    """Return all of a tensor that may be distributed."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _backward(outputs: Sequence[Tensor]) -> None:
    """Add gradients of the losses of all outputs to leaves."""
    trained = [_product(one) for one in outputs if one.requires_grad]
    if trained:
        torch.stack(trained).sum().backward()  # type: ignore[no-untyped-call]


def _of_outputs(
    outputs: Sequence[Any],
    expected: Sequence[Tensor],
) -> Amounts:
    """Compare outputs by their order, and whether they have gradients."""
    found = {"number of outputs": inf if len(outputs) != len(expected) else 0.0}
    for k, (output, one) in enumerate(zip(outputs, expected, strict=False)):
        alike = output.requires_grad == one.requires_grad
        found[f"output {k}"] = _difference(_whole(output), one, 0.0) if alike else inf
    return found


def _of_gradients(
    parts: Entries,
    tensors: Tensors,
) -> Amounts:
    """Compare the gradients of weights and inputs; one that is missing is zero."""
    trained = [tensor.grad for tensor in tensors.values() if tensor.grad is not None]
    largest = max((float(gradient.abs().max()) for gradient in trained), default=0.0)
    found = {}
    for name, part in parts.items():
        expected = getattr(tensors.get(name), "grad", None)
        known = [_whole(one) for one in (part.grad, expected) if one is not None]
        if len(known) == 2:
            made, wanted = known
            found[f"gradient of {name}"] = _difference(made, wanted, UNSEEN * largest)
        elif known and known[0].any():
            found[f"gradient of {name}"] = inf
    return found


def _difference(
    made: Tensor,
    expected: Tensor,
    unseen: float,
) -> float:
    """Return the largest difference over the largest entry; of numbers that are not real, the share."""
    if made.shape != expected.shape or made.dtype != expected.dtype:
        return inf
    made, expected = made.detach(), expected.detach()
    if not (made.is_floating_point() or made.is_complex()):
        return float((made != expected).double().mean())
    # infinite numbers, such as masks, are equal or wrong
    apart = (made - expected).abs().masked_fill(made == expected, 0.0)
    largest = expected.abs().nan_to_num(0.0, 0.0).amax()
    return float(apart.amax()) / max(float(largest), unseen, 1e-12)
