import random
import re

import pytest

from darts_parallel import evaluate, load_problem, plan
from darts_parallel.cost.tolerances import PLAN_MEMORY_TOLERANCE
from darts_parallel.errors import InfeasibleError


@pytest.mark.parametrize("seed", range(4))
def test_a_margin_is_left_free_and_more_of_it_never_makes_the_optimum_better(seed: int) -> None:
    chosen = random.Random(seed)
    job = [
        "model=toy",
        "training=toy",
        "cluster=toy",
        "search=exact",
        "space.out_of_memory=0.5",
        f"training.global_batch_size={chosen.choice([8, 16])}",
        f"cluster.devices.toy.memory_GiB={chosen.uniform(0.13, 0.14)}",
    ]
    before = 0.0
    for margin in (0.0, 0.1, 0.2):
        problem = load_problem([*job, f"space.memory_margin={margin}"])
        best = plan(problem).plan
        cost = evaluate(best, problem)
        assert cost.feasible
        for used, whole in zip(cost.memory_bytes, cost.capacity_bytes, strict=True):
            assert whole == pytest.approx(problem.cluster.groups[0].device.memory)
            assert used <= (1.0 - margin) * whole * (1.0 + PLAN_MEMORY_TOLERANCE)
        assert cost.iteration_time_s >= before * (1.0 - 1e-12)
        before = cost.iteration_time_s
    wide = [*job, "space.memory_margin=0.9"]
    with pytest.raises(InfeasibleError, match=r"freeing space\.memory_margin") as refused:
        plan(load_problem(wide))
    sizes = re.search(
        r"needs ([\d.]+) GiB of the ([\d.]+) GiB .*memory_GiB=([\d.]+)", str(refused.value)
    )
    needed, usable, enough = map(float, sizes.groups())
    whole = float(problem.cluster.groups[0].device.memory)
    assert usable == pytest.approx(0.1 * whole / 2**30, abs=0.006)
    assert enough == pytest.approx(needed / 0.1, abs=0.07)
    assert plan(load_problem([*wide, f"cluster.devices.toy.memory_GiB={enough}"])).plan
