import pytest
import torch

from darts_parallel.cost.evaluation import evaluate, evaluate_batch
from darts_parallel.cost.table import build_tables
from darts_parallel.gradient.relaxation import soft_stages, softmax_weights, stage_edges
from darts_parallel.gradient.relaxed_cost import RelaxedPlans, surrogate
from darts_parallel.plan.space import outer_spaces
from darts_parallel.problem.problem import Problem, load_problem
from tests.support.layer_kinds import HYBRID, PREDICTION
from tests.support.random_plans import assert_surrogate_is_exact, random_plans

PROBLEMS = {
    "default": [],
    "llama": ["model=llama3_8b", "cluster=h100_1x8", "training=llama3_8b"],
    "t5": ["model=t5_1_3b", "cluster=a10_4x4", "training=t5_1_3b"],
    "two node types": ["model=toy", "cluster=toy_mixed", "training=toy"],
    "uneven nodes": ["model=toy", "cluster=toy", "training=toy"],
    "hybrid": HYBRID,
    "prediction": PREDICTION,
}


SIMULATED = [
    ["cost.pipeline=simulated"],
    ["cost.pipeline=simulated", "cost.p2p=overlapped"],
    ["cost.pipeline=simulated", "cost.schedule=gpipe"],
    ["cost.pipeline=simulated", "cost.schedule=zero_bubble", "cost.p2p=overlapped"],
]
CASES = [(name, []) for name in PROBLEMS] + [("uneven nodes", cost) for cost in SIMULATED]


@pytest.mark.parametrize(("name", "cost"), CASES)
def test_surrogate_at_one_hot_weights_equals_evaluate(name: str, cost: list[str]) -> None:
    problem = load_problem(PROBLEMS[name] + cost)
    rng = torch.Generator().manual_seed(0)
    for table in build_tables(problem):
        # a few plans of every number of micro-batches
        table = table.select(list(range(table.num_outer)) * 3)
        plans = random_plans(table, table.num_outer, rng)
        assert_surrogate_is_exact(table, plans)


@pytest.mark.parametrize(("name", "cost"), CASES)
def test_evaluate_of_a_plan_equals_the_batch(name: str, cost: list[str]) -> None:
    problem = load_problem(PROBLEMS[name] + cost)
    rng = torch.Generator().manual_seed(7)
    for table in build_tables(problem):
        plans = random_plans(table, table.num_outer, rng)
        batch = evaluate_batch(table, plans)
        for index in {0, len(plans) - 1}:  # every one builds its table anew
            cost = evaluate(plans.to_plan(index, table), problem)
            assert cost.iteration_time_s == pytest.approx(float(batch.iteration_time[index]), rel=1e-12)
            assert sum(cost.breakdown_s.values()) == pytest.approx(cost.iteration_time_s, rel=1e-9)
            assert all(seconds >= 0 for seconds in cost.breakdown_s.values())
            assert cost.feasible == bool(batch.feasible[index])


@pytest.mark.parametrize("cost", SIMULATED)
@pytest.mark.parametrize("pp", [2, 4])
def test_gradients_of_a_simulated_surrogate_match_finite_differences(cost: list[str], pp: int) -> None:
    problem = load_problem([*PROBLEMS["uneven nodes"], *cost, f"space.pp={pp}"])
    (table,) = build_tables(problem)
    rng = torch.Generator().manual_seed(pp)
    logits = torch.randn(table.num_outer, 2, table.num_layers, len(table.choices), generator=rng).double()
    widths = torch.randn(table.num_outer, 2, pp, generator=rng).double()

    def seconds(logits: torch.Tensor, widths: torch.Tensor) -> torch.Tensor:
        weights = softmax_weights(logits, table.allowed[:, None, None, :], 1.0)
        stages = soft_stages(stage_edges(widths, table.num_layers), torch.arange(table.num_layers) + 0.5, 1.0)
        return surrogate(RelaxedPlans(weights, stages), table).iteration_time.log().sum()

    directions = [torch.randn(p.shape, generator=rng).double() for p in (logits, widths)]
    inputs = (logits.requires_grad_(), widths.requires_grad_())
    gradients = torch.autograd.grad(seconds(*inputs), inputs)
    slope = sum(float((g * d).sum()) for g, d in zip(gradients, directions, strict=True))
    with torch.no_grad():
        ahead, behind = (
            seconds(*(p + step * d for p, d in zip(inputs, directions, strict=True)))
            for step in (1e-6, -1e-6)
        )
    assert slope == pytest.approx(float(ahead - behind) / 2e-6, rel=1e-5, abs=1e-7)


# smooth maxima divide by a detached maximum, which their gradient leaves out on purpose: their error is
# of the order of log(n) / sharpness; exact maxima are differentiated exactly
@pytest.mark.parametrize(("sharpness", "tolerance"), [(None, 1e-6), (20.0, 0.02)])
@pytest.mark.parametrize("pp", [1, 2, 4])
def test_surrogate_gradients_match_finite_differences(
    toy_problem: Problem, pp: int, sharpness: float | None, tolerance: float
) -> None:
    (table,) = build_tables(toy_problem, [s for s in outer_spaces(toy_problem) if s.pp == pp][:1])
    rng = torch.Generator().manual_seed(pp)
    shape = (table.num_outer, 2, table.num_layers, len(table.choices))
    logits = torch.randn(shape, generator=rng, dtype=torch.float64, requires_grad=True)
    widths = torch.randn(table.num_outer, 2, pp, generator=rng, dtype=torch.float64, requires_grad=True)

    def loss(logits: torch.Tensor, widths: torch.Tensor) -> torch.Tensor:
        weights = softmax_weights(logits, table.allowed[:, None, None, :], 1.0)
        stages = soft_stages(stage_edges(widths, table.num_layers), torch.arange(table.num_layers) + 0.5, 1.0)
        cost = surrogate(RelaxedPlans(weights, stages), table, sharpness)
        memory = cost.memory / table.capacity
        return cost.iteration_time.log().sum() + memory.square().sum()

    direction = [torch.randn(p.shape, generator=rng, dtype=torch.float64) for p in (logits, widths)]
    gradients = torch.autograd.grad(loss(logits, widths), (logits, widths))
    slope = sum(float((g * d).sum()) for g, d in zip(gradients, direction, strict=True))
    step = 1e-5
    with torch.no_grad():
        ahead = loss(logits + step * direction[0], widths + step * direction[1])
        behind = loss(logits - step * direction[0], widths - step * direction[1])
    assert slope == pytest.approx(float(ahead - behind) / (2 * step), rel=tolerance, abs=tolerance / 10)
