"""Random legal hard plans of a cost table, and what the surrogate must say of them."""

import torch

from darts_parallel.cost.cost_table import CostTable
from darts_parallel.cost.evaluation import BatchCost, evaluate_batch, table_reading
from darts_parallel.cost.hard_plans import HardPlans, unit_starts
from darts_parallel.cost.host_memory import OffloadedPlans
from darts_parallel.gradient.relaxed_cost import RelaxedPlans, Surrogate


def random_plans(table: CostTable, count: int, rng: torch.Generator) -> HardPlans:
    """`count` plans of every outer choice in turn: random strategies, random stage starts."""
    units = unit_starts(table.fused_to_previous)
    outer = torch.arange(count) % table.num_outer
    starts = []
    for _ in range(count):
        inner = (
            torch.randperm(len(units) - 1, generator=rng)[: table.num_stages - 1].sort().values + 1
        )
        starts.append(units[torch.cat([torch.zeros(1, dtype=torch.long), inner])])
    weights = table.allowed[outer].double()
    choices = torch.multinomial(weights, table.num_layers, replacement=True, generator=rng)
    return HardPlans(outer, choices, torch.stack(starts))


def one_hot(plans: HardPlans, table: CostTable) -> RelaxedPlans:
    """Hard plans as weights, one for each outer choice in order: shapes `(O, 1, L, .)`."""
    choices = torch.nn.functional.one_hot(plans.choices, len(table.choices)).double()
    stages = torch.nn.functional.one_hot(plans.stages(), table.num_stages).double()
    fractions = None
    if table.host is not None:
        fractions = (
            OffloadedPlans(table, plans.outer, plans.choices, plans.stages(), table.host)
            .fractions()
            .unsqueeze(1)
        )
    return RelaxedPlans(choices.unsqueeze(1), stages.unsqueeze(1), fractions)


def assert_surrogate_is_exact(table: CostTable, plans: HardPlans) -> BatchCost:
    """Hold the surrogate at one-hot weights against the true cost, which is returned.

    Args:
        table: Costs.
        plans: One of every outer choice, in order.
    """
    hard, soft = evaluate_batch(table, plans), Surrogate(table)(one_hot(plans, table))
    torch.testing.assert_close(soft.iteration_time[:, 0], hard.iteration_time, rtol=1e-9, atol=0)
    torch.testing.assert_close(soft.memory[:, 0], hard.memory, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(soft.stage_seconds[:, 0], hard.stage_seconds, rtol=1e-9, atol=1e-15)
    once = table_reading(table, plans).per_iteration
    awaited = hard.iteration_time - once - hard.pipeline_end.amax(1)
    torch.testing.assert_close(
        soft.sync[:, 0], awaited, rtol=1e-9, atol=1e-9 * float(hard.iteration_time.max())
    )
    return hard
