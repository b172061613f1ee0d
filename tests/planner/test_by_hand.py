"""Small rules of the planner, each worked out by hand."""

from dataclasses import replace
from math import exp, log, sqrt
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from darts_parallel import LayerStrategy, Plan, load_problem
from darts_parallel.config import RunConfig
from darts_parallel.errors import InfeasibleError
from darts_parallel.planner import memory_chance, tuning
from darts_parallel.planner._session import Asked
from darts_parallel.planner.figure_posterior import LatentPlace, Posterior, ResidualSpreads
from darts_parallel.planner.memory_chance import within_chance
from darts_parallel.planner.prediction_intervals import time_slopes
from darts_parallel.planner.result import Planned
from darts_parallel.planner.run_figures import Trial
from darts_parallel.planner.tuning import _coordinates, _errors_given_trials, _fitting, _nearness

TOY = ["model=toy", "cluster=toy", "training=toy", "space.out_of_memory=0.2"]


def job(tp: int, zero: int = 0) -> Plan:
    return Plan(4, (0, 2, 4), (LayerStrategy(tp, 4 // tp, zero),) * 4)


def test_near_plans_share_what_a_trial_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    mixed = (
        *job(2, 1).layers[:2],
        LayerStrategy(4, 1, 3, "full"),
        LayerStrategy(4, 1, 3, "selective"),
    )
    # dp 2 and 1, tp 2 and 4, 2 stages, micro-batches of 64 / 4 sequences over dp, ZeRO 1 and 3
    assert _coordinates(Plan(4, (0, 2, 4), mixed), 64) == (0.5, 1.5, 1.0, 3.5, 2.0, 0.75)
    # half of dp, twice tp and micro-batch: three steps of log2; two ZeRO stages more
    plans = [job(1), job(2), job(1, 2)]
    near = torch.tensor(
        [[1.0, exp(-1.5), exp(-2.0)], [exp(-1.5), 1.0, exp(-3.5)], [exp(-2.0), exp(-3.5), 1.0]]
    )
    torch.testing.assert_close(_nearness(64, plans), near.double(), rtol=1e-6, atol=0)
    residuals = ResidualSpreads(seconds=0.0, shared=0.2, own=0.1, memory=0.0)
    known = Posterior({}, {}, torch.zeros(0, 0, dtype=torch.float64), residuals, {})
    monkeypatch.setattr(tuning, "posterior", lambda problem: known)
    monkeypatch.setattr(tuning, "time_elasticities", lambda plan, problem: {})
    runs = lambda trial, problem: RunConfig("", log(1.3), 1.0, {})  # noqa: E731
    monkeypatch.setattr(tuning, "seconds_run", runs)
    problem: Any = SimpleNamespace(training=SimpleNamespace(global_batch_size=64))
    mean, covariance = _errors_given_trials(problem, plans, [Trial("a", plans[1], 2.6)])
    variance = covariance.diagonal()
    shared = [0.04 + 0.01 * x for x in (exp(-1.5), 1.0, exp(-3.5))]
    assert mean.tolist() == pytest.approx([log(1.3) * x / (0.05 + 0.015**2) for x in shared])
    assert variance.tolist() == pytest.approx([0.05 - x**2 / (0.05 + 0.015**2) for x in shared])


def test_trials_say_what_fits() -> None:
    costs: Any = {
        job(tp): SimpleNamespace(fullness=(1.0 / 9.0, used / 10.0))
        for tp, used in ((1, 5), (2, 8), (4, 9))
    }
    costs[job(1, 1)] = SimpleNamespace(fullness=(1.0 / 9.0, 1.2))
    small, middle, large, too_large = costs
    assert _fitting(costs, [], []) == {small, middle, large}
    # 6 bytes instead of 5: a fifth more of all
    measured: Any = SimpleNamespace(error=log(6 / 5))
    assert _fitting(costs, [Trial("a", small, 1.0, 6.0)], [measured]) == {small, middle}
    assert _fitting(costs, [Trial("b", middle, None)], []) == {small}
    assert _fitting(costs, [Trial("a", too_large, 1.0)], []) == set(costs)


def test_spreads_and_slopes_of_a_posterior() -> None:
    spread = {
        "seconds": {"own": 0.1, "pair": 0.08, "experts": {"own": 0.2}},
        "memory": {"own": 0.03, "experts": {"own": 0.04}},
    }
    sds = {"state_factor": 0.3, "activation_factor": 0.5, "reserved_GiB": 0.1}
    quantities: Any = {
        name: {"prior_sd": {"base": sd}, "scale": "share"} for name, sd in sds.items()
    }
    quantities |= {name: {"scale": "share"} for name in ("gemm_efficiency", "intra_efficiency")}
    above = {"inter_latency_us": 0.25, "layer_overhead_us": 1.0}
    quantities |= {name: {"scale": {"above": least}} for name, least in above.items()}
    residuals = ResidualSpreads.read(spread, experts=False)
    assert ResidualSpreads.read(spread, experts=True).seconds == 0.2
    known = Posterior(quantities, {}, torch.zeros(0, 0, dtype=torch.float64), residuals, {})
    fast, slow = "cluster.nodes.0.intra_node", "cluster.inter_node.bandwidth_GBps=200"
    links = [f"{fast}.bandwidth_GBps=450", f"{fast}.efficiency=0.8", slow]
    problem = load_problem([*TOY, *links]).with_devices(
        lambda own: replace(
            own,
            memory=10.0 * 2**30,
            reserved=2.0 * 2**30,
            gemm_efficiency=0.75,
            layer_overhead=4e-6,
        )
    )
    # a pair of plans differs by sqrt 2 times what is each one's own; all share the rest of the whole
    assert (residuals.shared, residuals.own) == pytest.approx(
        (sqrt(0.1**2 - 0.08**2 / 2), 0.08 / sqrt(2))
    )
    assert known.difference == pytest.approx(1.2815515655 * 0.08)
    # of 5 GiB in use 2 are reserved, of which 1 is the context, and activations vary most
    assert known.memory_spread(problem.cluster, problem.software.name)(0.5) == pytest.approx(
        sqrt(0.4**2 + 0.02**2 + 0.03**2)
    )
    figures = {"gemm_efficiency": -0.4, "layer_overhead": 0.2, "peak_flops": -0.6}
    own = {f"devices.toy.{name}": value for name, value in figures.items()}
    own |= {"inter_node.latency": 0.1, "intra_node.bandwidth": -0.5}
    framework = problem.software.name
    slopes = {
        LatentPlace("gemm_efficiency", "toy", framework): -0.1,
        LatentPlace("layer_overhead_us", "toy", framework): 0.15,
        LatentPlace("inter_latency_us", framework=framework, inter="infiniband"): 0.075,
        LatentPlace("intra_efficiency", framework=framework, intra="nvlink4"): -0.1,
    }
    assert time_slopes(known, problem, own | {"memory": -0.3}) == pytest.approx(slopes)


def test_where_no_plan_fits_tightened_memory_the_loosest_is_planned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = load_problem(TOY)

    def find(headroom: float) -> Planned:
        if headroom:
            raise InfeasibleError("memory: smallest changes that help: more nodes.")
        return Planned(job(1), asked=Asked.of(problem, []), out_of_memory=0.4)

    monkeypatch.setattr(memory_chance, "any_fits", lambda *given: True)
    found = within_chance(Asked.of(problem, ()), find)
    assert (found.problem.headroom, found.out_of_memory) == (0.0, 0.4)
    assert found.warning == "no plan keeps space.out_of_memory=0.2; it takes more nodes"
