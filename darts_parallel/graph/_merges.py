"""Choices in which linear operators are one product: of one input, or two that follow each other."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product

from darts_parallel.graph._choices import GraphJob, OperatorChoice
from darts_parallel.graph._prices import product_shape
from darts_parallel.graph._states import PARTIAL, SLICED, State
from darts_parallel.graph.operators import GraphOperator

MOST_MERGED = 4
"""Linear operators of one input up to which any of them may be one product."""
Numbers = tuple[int, ...]


@dataclass(frozen=True)
class ChoiceGroup:
    """Equal operators of repeated blocks, which choose together."""

    operators: tuple[GraphOperator, ...]
    choices: tuple[OperatorChoice, ...]


def with_merged(job: GraphJob, groups: list[ChoiceGroup]) -> list[ChoiceGroup]:
    """Add the choices in which linear operators are one product."""
    found = [list(group.choices) for group in groups]
    linears = _Linears(job, groups)
    for merged in linears.parallel():
        for group, choice in _side_by_side(job, groups, merged):
            found[group].append(choice)
    for merged in linears.chained():
        ops = [groups[g].operators[0] for g in merged]
        for one, two in product(*(groups[g].choices for g in merged)):
            both = _weights_first(job, ops, one, two, merged)
            for group, choice in zip(merged, both, strict=False):
                found[group].append(choice)
    pairs = zip(groups, found, strict=True)
    return [ChoiceGroup(old.operators, tuple(every)) for old, every in pairs]


class _Linears:
    """Linear operators with a parameter as weight, by the groups that they belong to."""

    def __init__(self, job: GraphJob, groups: Sequence[ChoiceGroup]) -> None:
        self.graph = job.graph
        self.groups = groups
        self.group_of = {}
        for number, group in enumerate(groups):
            for op in group.operators:
                if op.op == "linear" and job.graph.is_parameter(op.inputs[1]):
                    self.group_of[op.name] = number
        self.operators = [op for op in job.graph.operators if op.name in self.group_of]

    def parallel(self) -> list[Numbers]:
        """Return any two or more groups of linear operators of one input, with a bias or without."""
        readers = defaultdict[object, list[int]](list)
        for op in self.operators:
            trained = [self.graph.values[name].needs_grad for name in op.inputs]
            readers[op.inputs[0], tuple(trained)].append(self.group_of[op.name])
        found: list[Numbers] = []
        for numbers in self._complete(Counter(map(tuple, readers.values()))):
            for size in range(2, len(numbers) + 1):
                found += combinations(numbers, size)
        return found

    def chained(self) -> list[Numbers]:
        """Return pairs of groups of which the second alone reads the first, which has no bias."""
        found = Counter[Numbers]()
        for op in self.operators:
            (after, slot), *others = self.graph.consumers[op.outputs[0]]
            alone = len(op.inputs) == 2 and not others and slot == 0
            if alone and after.name in self.group_of:
                found[self.group_of[op.name], self.group_of[after.name]] += 1
        return self._complete(found)

    def _complete(self, found: Counter[Numbers]) -> list[Numbers]:
        """Return the tuples of distinct groups that cover every operator of their groups."""
        complete = []
        for numbers, count in found.items():
            distinct = 2 <= len(numbers) == len(set(numbers)) <= MOST_MERGED
            sizes = {len(self.groups[g].operators) for g in numbers}
            if distinct and sizes == {count}:
                complete.append(numbers)
        return complete


def _side_by_side(
    job: GraphJob,
    groups: Sequence[ChoiceGroup],
    merged: Numbers,
) -> Iterator[tuple[int, OperatorChoice]]:
    """Yield the choices of groups in which their operators are one wide product.

    Every operator has its weights' share of the seconds, in every state that all of them know.
    """
    ops = [groups[g].operators[0] for g in merged]
    known = [{choice.states: choice for choice in groups[g].choices} for g in merged]
    elements = [job.graph.values[op.inputs[1]].elements for op in ops]
    for states, choice in known[0].items():
        if SLICED in states[0] or not all(states in one for one in known):
            continue
        each = _wide_seconds(job, ops, choice) / sum(elements)
        for group, own, size in zip(merged, known, elements, strict=True):
            yield group, replace(own[states], seconds=each * size, merged=merged)


def _wide_seconds(
    job: GraphJob,
    ops: Sequence[GraphOperator],
    choice: OperatorChoice,
) -> float:
    """Return the seconds of one product with the columns of all operators, forward and backward."""
    shapes = []
    for op in ops:
        inputs = job.local_shapes(op.inputs, choice.inputs)
        output = job.local_shapes(op.outputs, choice.outputs)[0]
        shapes.append(product_shape(op, inputs, output))
    columns = sum(shape.weights.out_features for shape in shapes)
    wide = replace(shapes[0].weights, out_features=columns)
    passes = 1 + job.graph.gradients(ops[0].inputs[:2])
    return passes * job.prices.product(shapes[0].rows, wide)


def _weights_first(
    job: GraphJob,
    ops: Sequence[GraphOperator],
    one: OperatorChoice,
    two: OperatorChoice,
    merged: Numbers,
) -> list[OperatorChoice]:
    """Return how two linear operators `(x A) B` are `x (A B)` in the states of two choices.

    The tensor between them is absent: nothing may have to move it, else the list is empty.
    """
    sums = _summed_axes(one, two)
    if sums is None:
        return []
    x, a = one.inputs
    b, *bias = two.inputs[1:]
    bias = [_with_sums(state, sums) for state in bias]
    y = _with_sums(two.outputs[0], sums)
    chained = x, a, b, y
    names = *ops[0].inputs, ops[1].inputs[1], *ops[1].outputs
    own_x, (_, inner), (columns, between), own_y = job.local_shapes(names, chained)
    last = product_shape(ops[1], (own_x, (columns, inner)), own_y)
    weights = replace(last.weights, out_features=inner, in_features=between)
    of_weights = job.graph.gradients(names[1:3])
    seconds = (1 + of_weights) * job.prices.product(columns, weights)
    first = replace(one, seconds=seconds, merged=merged, chained=chained)
    passes = 1 + job.graph.gradients(names[:1]) + (of_weights > 0)
    seconds = passes * job.prices.product(last.rows, last.weights)
    second = replace(two, inputs=(one.outputs[0], b, *bias), outputs=(y,), weights=columns * inner)
    return [first, replace(second, seconds=seconds, merged=merged, chained=chained)]


def _summed_axes(one: OperatorChoice, two: OperatorChoice) -> list[bool] | None:
    """Return on which axes the product of both is a sum; None where a tensor between them would move."""
    sums = []
    states = zip(one.labels, two.labels, one.outputs[0], two.inputs[0], strict=True)
    for before, after, made, wanted in states:
        summed = (before, after) == ("inner", "none*")
        alike = before == after or (before, after) == ("none*", "columns")
        if not summed and not (alike and made == wanted):
            return None
        sums.append(summed)
    return sums


def _with_sums(state: State, sums: Sequence[bool]) -> State:
    """Return a state that is a sum on some axes."""
    pairs = zip(state, sums, strict=True)
    return tuple(PARTIAL if summed else one for one, summed in pairs)
