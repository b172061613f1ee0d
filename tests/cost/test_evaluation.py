"""Check what `evaluate` says next to seconds, by its definition."""

import pytest

from darts_parallel import evaluate, load_problem
from darts_parallel.cost import build_tables
from darts_parallel.exact import find_uniform_plan


@pytest.mark.parametrize("cluster", ["a10_8x4", "a10_a100_mixed"])
def test_utilization_is_six_flop_a_parameter_and_token_over_all_peaks(cluster: str) -> None:
    problem = load_problem(
        ["model=gpt2_xl", "training=gpt2_xl", f"cluster={cluster}", "space=uniform"]
    )
    tables = build_tables(problem)
    best = find_uniform_plan(tables).best
    cost = evaluate(best.to_plan(tables), problem)
    peak = sum(g.count * g.gpus * g.device.peak_flops for g in problem.cluster.groups)
    model = 6 * problem.model.num_parameters * cost.tokens_per_s / peak
    # attention over 1,024 tokens adds a tenth
    assert cost.mfu == pytest.approx(1.08 * model, rel=0.08)
    assert cost.tokens_per_s == pytest.approx(problem.tokens_per_iteration / cost.iteration_time_s)
