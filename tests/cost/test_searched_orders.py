"""Memory under an order of passes that no rule writes, counted pass by pass."""

from dataclasses import replace

import pytest
import torch

from darts_parallel.cost import (
    CostTable,
    HardPlans,
    PassSeconds,
    evaluate_batch,
    held_at_most,
    pass_seconds,
)
from darts_parallel.schedules import find
from tests.support.random_plans import random_plans
from tests.support.random_tables import random_table

PP, COUNT = 3, 6


def searched_table(seed: int, schedule: str) -> CostTable:
    """A random table under the code of a rule; every other device does some backward passes at once."""
    chunks = find(schedule).chunks or 2
    table = random_table(seed, pp=PP * chunks, num_layers=PP * chunks + 3, num_outer=1)
    rng = torch.Generator().manual_seed(seed)
    kept = table.activation * (0.2 + 1.6 * torch.rand(table.activation.shape, generator=rng))
    pipeline = replace(table.pipeline, simulated=True, schedule=schedule, free=True)
    table = replace(
        table,
        pipeline=pipeline,
        num_micro_batches=torch.tensor([COUNT]),
        for_weights=kept,
        capacity=table.capacity[:PP] * chunks,
    )
    head, *rows = find(schedule).code(PP, COUNT, chunks).split(";")
    joined = []
    for device, row in enumerate(rows):
        words = row.split()
        for word in list(words) if device % 2 == 0 else []:
            weights = word.replace("I", "W")
            if "I" in word and words[words.index(word) + 1 :][:1] == [weights]:
                words[words.index(word)] = word.replace("I", "B")
                words.remove(weights)
        joined.append(" ".join(words))
    return table.with_schedule_memory().with_order(0, ";".join([head, *joined]))


def fullest(table: CostTable, plans: HardPlans, row: int) -> list[float]:
    """Bytes of every device at its fullest moment: one pass after the other."""
    places, choices = plans.stages()[row].tolist(), plans.choices[row].tolist()
    assert table.before is not None
    before, between = [0.0] * table.num_stages, [0.0] * table.num_stages
    static, working = [0.0] * PP, [0.0] * PP
    for layer, (stage, choice) in enumerate(zip(places, choices, strict=True)):
        before[stage] += float(table.before[0, layer, choice])
        between[stage] += float(table.for_weights[0, layer, choice])
        device = int(table.stage_device[stage])
        static[device] += float(table.static[0, layer, choice])
        working[device] = max(working[device], float(table.working[0, layer, choice]))
    change = {"F": (1, 0), "B": (-1, 0), "I": (-1, 1), "W": (0, -1)}
    found = []
    for device, order in enumerate(
        find(table.pipeline.schedule).orders(PP, COUNT, table.virtual_stages)
    ):
        now = most = 0.0
        for kind, stage, _ in order:
            early, late = change[kind]
            now += early * before[stage] + late * between[stage]
            most = max(most, now)
        assert now == pytest.approx(0.0, abs=1e-9)
        found.append(static[device] + working[device] + most)
    return found


@pytest.mark.parametrize(
    "schedule", ["1f1b", "zero_bubble_h1", "interleaved", "zero_bubble_v", "v_min"]
)
@pytest.mark.parametrize("seed", range(3))
def test_a_device_holds_what_its_passes_hold_at_its_fullest_moment(
    schedule: str, seed: int
) -> None:
    table = searched_table(seed, schedule)
    plans = random_plans(table, 6, torch.Generator().manual_seed(seed))
    memory = evaluate_batch(table, plans).memory
    for row in range(len(plans)):
        want = fullest(table, plans, row)
        assert memory[row].tolist() == pytest.approx(want, rel=1e-12)
        # the counts of that moment explain the bytes
        early, late = held_at_most(table, plans[row : row + 1])
        chosen = plans.choices[row].unsqueeze(1)
        stages = plans.stages()[row]
        columns = (table.before, table.for_weights, table.static)
        parts = [values[0].gather(1, chosen)[:, 0] for values in columns if values is not None]
        kept = parts[2] + early[stages] * parts[0] + late[stages] * parts[1]
        device = table.stage_device[stages]
        work = table.working[0].gather(1, chosen)[:, 0]
        for number, bytes_ in enumerate(want):
            mine = device == number
            assert float(kept[mine].sum() + work[mine].max()) == pytest.approx(bytes_, rel=1e-12)


def ends(table: CostTable, passes: PassSeconds, row: int) -> list[float]:
    """Seconds at which every device has run its passes, each as soon as its input is there."""
    last = table.num_stages - 1
    forward, backward, weight, message = (
        values[row].tolist()
        for values in (passes.forward, passes.backward, passes.weight_gradient, passes.message)
    )
    orders = find(table.pipeline.schedule).orders(PP, COUNT, table.virtual_stages)
    left = [list(order) for order in orders]
    free, done = [0.0] * PP, {}
    while any(left):
        for device, order in enumerate(left):
            if not order:
                continue
            kind, stage, batch = order[0]
            source, delay = None, 0.0
            if kind == "F" and stage:
                source, delay = ("F", stage - 1, batch), message[stage - 1]
            elif kind in "BI":
                source = ("F", last, batch) if stage == last else ("B", stage + 1, batch)
                delay = 0.0 if stage == last else message[stage]
            if source is not None and source not in done:
                continue
            parts = {"F": forward, "B": backward, "W": weight}
            whole = backward[stage] - weight[stage] if kind == "I" else parts[kind][stage]
            begin = max(free[device], done[source] + delay if source else 0.0)
            free[device] = begin + whole
            done["B" if kind == "I" else kind, stage, batch] = free[device]
            order.pop(0)
    return free


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble_h1", "zero_bubble_v", "v_min"])
def test_whole_and_split_backward_passes_take_their_seconds(schedule: str, blocking: bool) -> None:
    table = searched_table(1, schedule)
    table = replace(table, pipeline=replace(table.pipeline, blocking=blocking))
    plans = random_plans(table, 3, torch.Generator().manual_seed(0))
    cost, passes = evaluate_batch(table, plans), pass_seconds(table, plans)
    if blocking:
        passes = passes.blocking()
    for row in range(len(plans)):
        layers = torch.arange(table.num_layers)
        once = float(table.per_iteration[0, layers, plans.choices[row]].sum())
        ended = zip(ends(table, passes, row), cost.sync_seconds[row].tolist(), strict=True)
        want = max(end + sync for end, sync in ended) + once
        assert float(cost.iteration_time[row]) == pytest.approx(want, rel=1e-12)


def test_under_a_rule_the_counts_are_those_of_the_table() -> None:
    table = random_table(0)
    plan = random_plans(table, 2, torch.Generator().manual_seed(0))[1:]
    early, late = held_at_most(table, plan)
    assert early.tolist() == table.in_flight[1].tolist()
    assert not late.any()
