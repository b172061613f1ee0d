"""Local improvement of hard plans: steepest descent over layers, runs of layers, stages and edges.

The search reports its raw plan beside the polished one, so that this step hides nothing.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from darts_parallel.config import SpaceConfig
from darts_parallel.cost import HardPlans, evaluate_batch
from darts_parallel.discretize import repair, unit_starts
from darts_parallel.table import CostTable

RELATIVE_GAIN = 1e-12
"""A move must gain more than rounding."""
KICK_LIMIT = 1.05
"""A descent from other edges begins at most this much above the best plan."""


def polish(
    table: CostTable, plan: HardPlans, kind: str, *, kicks: int = 0, stop: Callable[[], bool] = lambda: False
) -> tuple[HardPlans, float, int]:
    """Descend from a feasible plan until no move of any neighbourhood helps.

    Args:
        plan: One plan.
        kind: `uniform`, `stagewise` or `layerwise`: moves stay in the space.
        kicks: Best plans of other edges from which a further descent is tried when moves no longer
            help (layer-wise only).
        stop: Asked before every move; true ends the descent early.

    Returns:
        The plan, its seconds per iteration, and how many plans were evaluated.
    """
    levels = [_moves, _pairs] if kind == "layerwise" else [_moves]
    plan, best, evaluated = _descend(table, plan, kind, levels, stop)
    while kicks and kind == "layerwise" and table.pp > 1 and not stop():
        starts = _kicked(table, plan, best, kicks)
        evaluated += len(starts)
        results = [_descend(table, starts[i : i + 1], kind, levels[:1], stop) for i in range(len(starts))]
        evaluated += sum(result[2] for result in results)
        trial, time, _ = min(results, key=lambda result: result[1], default=(plan, best, 0))
        if time >= best * (1.0 - RELATIVE_GAIN):
            break
        plan, best, more = _descend(table, trial, kind, levels, stop)
        evaluated += more
    return plan, best, evaluated


def _descend(
    table: CostTable,
    plan: HardPlans,
    kind: str,
    neighbourhoods: Sequence[Callable[[CostTable, HardPlans, str], HardPlans]],
    stop: Callable[[], bool],
) -> tuple[HardPlans, float, int]:
    """Steepest descent; a later neighbourhood is asked only where the earlier ones have no move."""
    best = float(evaluate_batch(table, plan).iteration_time[0])
    evaluated, level = 0, 0
    while level < len(neighbourhoods) and not stop():
        candidates = neighbourhoods[level](table, plan, kind)
        cost = evaluate_batch(table, candidates)
        evaluated += len(candidates)
        times = cost.iteration_time.masked_fill(~cost.feasible, torch.inf)
        index = int(times.argmin())
        if float(times[index]) < best * (1.0 - RELATIVE_GAIN):
            plan, best, level = candidates[index : index + 1], float(times[index]), 0
        else:
            level += 1
    return plan, best, evaluated


def _kicked(table: CostTable, plan: HardPlans, best: float, count: int) -> HardPlans:
    """Plans of neighbouring edges whose strategies are chosen anew: the fastest ones, repaired."""
    moved = HardPlans.concatenate(_edge_moves(table, plan, "uniform"))
    outer, layers = plan.outer[0], torch.arange(table.num_layers)
    time = table.num_micro_batches[outer] * table.time[outer, table.stage_kind[plan.stages()[0]], layers]
    same = table.layout == table.layout[plan.choices[0]].unsqueeze(1)
    fastest = time.masked_fill(~(same & table.allowed[outer]), torch.inf).argmin(1)
    anew = HardPlans(moved.outer, fastest.expand(len(moved), -1), moved.starts)
    trials = HardPlans.concatenate([moved, anew])
    fixed, cost = repair(table, trials, KICK_LIMIT * best)
    times = cost.iteration_time.masked_fill(~cost.feasible, torch.inf)
    order = times.argsort(stable=True)[:count]
    return fixed[order[times[order] < KICK_LIMIT * best]]


def _moves(table: CostTable, plan: HardPlans, kind: str) -> HardPlans:
    """Changes of strategies, of edges, and of the outer choice."""
    strategies = {"uniform": _whole, "stagewise": _per_stage, "layerwise": _runs}[kind](table, plan)
    parts = [plan, strategies, *_edge_moves(table, plan, kind)]
    outer = HardPlans(
        torch.arange(table.num_outer),
        plan.choices.expand(table.num_outer, -1),
        plan.starts.expand(table.num_outer, -1),
    )
    return HardPlans.concatenate([*parts, outer])


def _with_choices(plan: HardPlans, choices: Tensor) -> HardPlans:
    count = len(choices)
    return HardPlans(plan.outer.expand(count), choices, plan.starts.expand(count, -1))


def _whole(table: CostTable, plan: HardPlans) -> HardPlans:
    choices = torch.arange(len(table.choices)).unsqueeze(1).expand(-1, table.num_layers)
    return _with_choices(plan, choices)


def _per_stage(table: CostTable, plan: HardPlans) -> HardPlans:
    """Every stage, and every pair of neighbouring edges' stages, with every strategy."""
    stages = plan.stages()[0]
    masks = torch.stack([stages == k for k in range(table.pp)])
    tails = torch.stack([stages >= k for k in range(table.pp)])
    return _with_choices(plan, _replace(table, plan, torch.cat([masks, tails])))


def _runs(table: CostTable, plan: HardPlans) -> HardPlans:
    """Every run of layers inside a stage, whole stages and the whole model, with every strategy."""
    stages = plan.stages()[0]
    layers = torch.arange(table.num_layers)
    masks = []
    for first in range(table.num_layers):
        same = stages == stages[first]
        ends = [first, *range(first + 1, int(layers[same].max()) + 1)]
        masks.extend((layers >= first) & (layers <= end) for end in ends)
    masks.append(torch.ones_like(same))
    unique = torch.stack(masks)
    if len(unique) * len(table.choices) > 20_000:  # long stages: single layers, suffixes, prefixes
        first, last = layers[unique.double().argmax(1)], unique.sum(1)
        stage_first = plan.starts[0][stages[first]]
        stage_end = torch.cat([plan.starts[0][1:], torch.tensor([table.num_layers])])[stages[first]]
        keep = (last <= 2) | (first == stage_first) | (first + last == stage_end)
        unique = unique[keep]
    return _with_choices(plan, _replace(table, plan, unique))


def _replace(table: CostTable, plan: HardPlans, masks: Tensor) -> Tensor:
    """Choices with the layers of every mask `(N, L)` set to every strategy, `(N * C, L)`."""
    targets = torch.arange(len(table.choices)).view(1, -1, 1)
    replaced = torch.where(masks.unsqueeze(1), targets, plan.choices.view(1, 1, -1))
    return replaced.reshape(-1, table.num_layers)


def _edge_moves(table: CostTable, plan: HardPlans, kind: str) -> list[HardPlans]:
    """Every range of neighbouring edges moved by one unit either way.

    A range of edges moved together takes a layer from one stage and gives it to another. Layers that
    change stage keep their strategy, or take that of their new stage.
    """
    if table.pp == 1:
        return []
    units = unit_starts(table.joined)
    position = torch.searchsorted(units, plan.starts[0].contiguous())
    inner = table.pp - 1
    first, last = torch.triu_indices(inner, inner)
    order = torch.arange(inner)
    block = ((order >= first.unsqueeze(1)) & (order <= last.unsqueeze(1))).long()
    shifted = torch.cat([position[1:] + block, position[1:] - block])
    full = torch.cat([torch.zeros(len(shifted), 1, dtype=torch.long), shifted], dim=1)
    end = torch.full((len(full), 1), len(units))
    legal = (torch.cat([full, end], 1).diff(dim=1) > 0).all(1)
    starts = units[full[legal]]
    count = len(starts)
    kept = HardPlans(plan.outer.expand(count), plan.choices.expand(count, -1), starts)
    if kind == "uniform" or count == 0:
        return [kept]
    adopted = HardPlans(kept.outer, _adopt(plan, kept), starts)
    return [adopted] if kind == "stagewise" else [kept, adopted]


def _adopt(plan: HardPlans, moved: HardPlans) -> Tensor:
    """Choices where every layer that changed stage takes the one that its new stage began or ended with."""
    old, new = plan.stages().expand(len(moved), -1), moved.stages()
    ends = torch.cat([plan.starts[0][1:], torch.tensor([plan.choices.shape[1]])]) - 1
    from_left = plan.choices[0][plan.starts[0][new]]
    from_right = plan.choices[0][ends[new]]
    adopted = torch.where(new > old, from_left, from_right)
    return torch.where(new == old, plan.choices.expand_as(new), adopted)


def _pairs(table: CostTable, plan: HardPlans, kind: str) -> HardPlans:
    """Two layers of one stage changed at once (one gives memory, the other takes it)."""
    stages = plan.stages()[0]
    rows = []
    for stage in range(table.pp):
        members = torch.nonzero(stages == stage).squeeze(1)
        representatives = _representatives(table, plan, members)
        singles = [(layer, c) for layer in representatives for c in range(len(table.choices))]
        layer = torch.tensor([s[0] for s in singles])
        choice = torch.tensor([s[1] for s in singles])
        useful = table.allowed[plan.outer[0], choice] & (choice != plan.choices[0, layer])
        layer, choice = layer[useful], choice[useful]
        a, b = torch.triu_indices(len(layer), len(layer), offset=1)
        distinct = layer[a] != layer[b]
        a, b = a[distinct], b[distinct]
        limit = 40_000 // table.pp
        if len(a) > limit:
            a, b = a[:: len(a) // limit + 1], b[:: len(b) // limit + 1]
        rows.append(_two_changes(plan, layer[a], choice[a], layer[b], choice[b]))
    candidates = [row for row in rows if len(row)]
    return _with_choices(plan, torch.cat([plan.choices, *candidates]))


def _representatives(table: CostTable, plan: HardPlans, members: Tensor) -> list[int]:
    """Layers of a stage that differ in costs, strategy or place in a run: at most two of each."""
    outer, count = int(plan.outer[0]), dict[tuple[float, ...], int]()
    chosen = []
    for layer in members.tolist():
        times = table.time[outer, 0, layer]
        key = (int(plan.choices[0, layer]), float(times[table.allowed[outer]].sum()))
        count[key] = count.get(key, 0) + 1
        if count[key] <= 2:
            chosen.append(layer)
    return chosen


def _two_changes(plan: HardPlans, a: Tensor, choice_a: Tensor, b: Tensor, choice_b: Tensor) -> Tensor:
    choices = plan.choices.repeat(len(a), 1)
    choices.scatter_(1, a.unsqueeze(1), choice_a.unsqueeze(1))
    choices.scatter_(1, b.unsqueeze(1), choice_b.unsqueeze(1))
    return choices


def is_in_space(plan: HardPlans, space: SpaceConfig) -> bool:
    """Whether one hard plan obeys `space.kind`."""
    if space.kind == "layerwise":
        return True
    if space.kind == "uniform":
        return bool((plan.choices == plan.choices[:, :1]).all())
    first = plan.choices.gather(1, plan.starts.gather(1, plan.stages()))
    return bool((plan.choices == first).all())
