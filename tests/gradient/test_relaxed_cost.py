import pytest
import torch

from darts_parallel.cost.evaluation import evaluate
from darts_parallel.cost.table import build_tables
from darts_parallel.gradient.relaxation import soft_stages, softmax_weights, stage_edges
from darts_parallel.gradient.relaxed_cost import RelaxedPlans, Surrogate
from darts_parallel.problem.problem import load_problem
from darts_parallel.schedules import NAMES
from tests.support.export_plans import LLAMA, MIXTURE
from tests.support.layer_kinds import HYBRID, PREDICTION, TOY
from tests.support.random_plans import assert_surrogate_is_exact, random_plans

PROBLEMS = {
    "default": [],
    "llama": ["model=llama3_8b", "cluster=h100_1x8", "training=llama3_8b"],
    "t5": ["model=t5_1_3b", "cluster=a10_4x4", "training=t5_1_3b"],
    "two node types": ["model=toy", "cluster=toy_mixed", "training=toy"],
    "uneven nodes": ["model=toy", "cluster=toy", "training=toy"],
    "hybrid": HYBRID,
    "prediction": PREDICTION,
    "adapters": [*LLAMA, "training.lora_rank=4", "model.num_layers=2", "space.pp=2"],
    "adapters of a mixture": [*MIXTURE, "training.lora_rank=4", "model.num_layers=2", "space.pp=2"],
    "experts": [
        "model=toy_moe",
        *TOY[1:],
        "space.etp=null",
        "space.cp=null",
        "space.recompute=[none,selective]",
    ],
    "context": [*TOY, "space.cp=null"],
    "interleaved": [*TOY, "space.pp=2", "space.virtual_stages=[2,3]"],
    "interleaved over two node types": [
        "model=toy",
        "cluster=toy_mixed",
        "training=toy",
        "space.virtual_stages=2",
        "space.zero_stage=0",
    ],
    "every schedule": [
        *TOY,
        f"space.schedules=[{','.join(NAMES)}]",
        "space.pp=[2,3]",
        "model.num_layers=8",
        "space.zero_stage=[0,1,3]",
    ],
}


SIMULATED = [
    ["cost.pipeline=simulated"],
    ["cost.pipeline=simulated", "cost.p2p=overlapped"],
    ["cost.pipeline=simulated", "cost.schedule=gpipe"],
    ["cost.pipeline=simulated", "cost.schedule=zero_bubble", "cost.p2p=overlapped"],
]
CASES = [(name, []) for name in PROBLEMS] + [("uneven nodes", cost) for cost in SIMULATED]
CASES += [("interleaved", SIMULATED[0])]


@pytest.mark.parametrize(("name", "cost"), CASES)
def test_one_hot_surrogate_and_evaluate_give_the_cost_of_the_batch(
    name: str, cost: list[str]
) -> None:
    problem = load_problem(PROBLEMS[name] + cost)
    rng = torch.Generator().manual_seed(0)
    for table in build_tables(problem):
        # a few plans of every number of micro-batches
        table = table.select(list(range(table.num_outer)) * 3)
        plans = random_plans(table, table.num_outer, rng)
        hard = assert_surrogate_is_exact(table, plans)
        for index in {0, len(plans) - 1}:  # every one builds its own table
            plan = plans.to_plan(index, table)
            assert (plan.cp, plan.pp, plan.virtual_stages) == (
                table.cp,
                table.pp,
                table.virtual_stages,
            )
            priced = evaluate(plan, problem)
            assert priced.iteration_time_s == pytest.approx(
                float(hard.iteration_time[index]), rel=1e-12
            )
            assert sum(priced.breakdown_s.values()) == pytest.approx(
                priced.iteration_time_s, rel=1e-9
            )
            assert all(seconds >= 0 for seconds in priced.breakdown_s.values())
            assert priced.feasible == bool(hard.feasible[index])


# smooth maxima divide by a detached maximum, which their gradient leaves out on purpose: their error is
# of the order of log(n) / sharpness; exact maxima are differentiated exactly
@pytest.mark.parametrize(
    ("cost", "sharpness", "tolerance"),
    [([], None, 1e-6), ([], 20.0, 0.02), *((cost, None, 1e-5) for cost in SIMULATED)],
)
@pytest.mark.parametrize("pp", [1, 2, 4])
def test_gradients_are_slopes(
    pp: int, cost: list[str], sharpness: float | None, tolerance: float
) -> None:
    problem = load_problem([*TOY, *cost, f"space.pp={pp}"])
    table = build_tables(problem)[-1]
    rng = torch.Generator().manual_seed(pp)
    shape = (table.num_outer, 2, table.num_layers, len(table.choices))
    logits = torch.randn(shape, generator=rng, dtype=torch.float64, requires_grad=True)
    widths = torch.randn(
        table.num_outer, 2, pp, generator=rng, dtype=torch.float64, requires_grad=True
    )

    def loss(logits: torch.Tensor, widths: torch.Tensor) -> torch.Tensor:
        weights = softmax_weights(logits, table.allowed[:, None, None, :], 1.0)
        stages = soft_stages(
            stage_edges(widths, table.num_layers), torch.arange(table.num_layers) + 0.5, 1.0
        )
        cost = Surrogate(table)(RelaxedPlans(weights, stages), sharpness)
        memory = cost.memory / table.capacity
        return cost.iteration_time.log().sum() + memory.square().sum()

    direction = [torch.randn(p.shape, generator=rng, dtype=torch.float64) for p in (logits, widths)]
    gradients = torch.autograd.grad(loss(logits, widths), (logits, widths))
    slope = sum(float((g * d).sum()) for g, d in zip(gradients, direction, strict=True))
    step = 1e-6 if cost else 1e-5
    with torch.no_grad():
        ahead = loss(logits + step * direction[0], widths + step * direction[1])
        behind = loss(logits - step * direction[0], widths - step * direction[1])
    assert slope == pytest.approx(
        float(ahead - behind) / (2 * step), rel=tolerance, abs=tolerance / 10
    )
