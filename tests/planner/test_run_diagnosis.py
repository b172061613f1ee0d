"""A run that the model does not believe: no figure moves, and each listed figure explains it."""

from dataclasses import replace
from itertools import combinations

import pytest

from darts_parallel.config.cluster import RunConfig
from darts_parallel.cost.evaluation import evaluate
from darts_parallel.planner.run_diagnosis import BELIEVED, deviations
from darts_parallel.planner.run_figures import Trial, own_cluster, peak_stage
from darts_parallel.plans.strategy import LayerStrategy, Plan
from darts_parallel.problem.problem import Problem, load_problem

OVERRIDES = ["model=gpt2_xl", "training=gpt2_xl", "cluster=a10_8x4", "training.software=nanotron"]


@pytest.fixture(scope="module")
def problem() -> Problem:
    return load_problem(OVERRIDES)


@pytest.fixture(scope="module")
def plan(problem: Problem) -> Plan:
    strategy = LayerStrategy(1, 32, zero_stage=1, recompute="full")
    return Plan(2, (0, problem.num_layers), (strategy,) * problem.num_layers)


def test_a_run_near_the_prediction_is_believed(problem: Problem, plan: Plan) -> None:
    cost = evaluate(plan, problem)
    seconds, used = cost.iteration_time_s, max(cost.memory_bytes)
    assert deviations(problem, Trial("log", plan, 1.1 * seconds, 1.05 * used)) == []
    assert deviations(problem, Trial("log", plan, None)) == []


@pytest.mark.parametrize("ratio", [4.0, 0.25])
def test_each_figure_alone_explains_the_run(problem: Problem, plan: Plan, ratio: float) -> None:
    seconds = ratio * evaluate(plan, problem).iteration_time_s
    (found,) = deviations(problem, Trial("log", plan, seconds))
    assert found.ratio == pytest.approx(ratio)
    assert found.sds > BELIEVED
    sentences = list(found.sentences())
    assert "change no figure" in sentences[0]
    assert len(sentences) == 2 + len(found.explanations)
    # figures of a cluster with runs hold as they stand
    cluster = replace(own_cluster(problem), runs=[RunConfig("log", 0.0, 1.0, {})])
    for own in found.explanations:
        if not own.words.startswith("cluster.devices."):
            continue
        _, _, device, field = own.words.split(".")
        moved = replace(cluster.devices[device], **{field: own.needed})
        devices = {**cluster.devices, device: moved}
        config = replace(problem.config, cluster=replace(cluster, devices=devices))
        again = evaluate(plan, Problem.from_config(config))
        assert again.iteration_time_s == pytest.approx(seconds, rel=0.02), own


def test_a_slow_network_is_among_the_explanations(problem: Problem, plan: Plan) -> None:
    slow = load_problem([*OVERRIDES, "cluster.inter_node.bandwidth_GBps=0.2"])
    seconds = evaluate(plan, slow).iteration_time_s
    (found,) = deviations(problem, Trial("log", plan, seconds))
    (own,) = [own for own in found.explanations if own.words == "bandwidth between nodes"]
    assert own.needed == pytest.approx(0.2 * own.value / 5.0, rel=0.05)


@pytest.mark.slow
def test_the_peak_of_one_rank_is_compared_with_the_stages_that_may_have_it() -> None:
    problem = load_problem(["model=llama3_8b", "cluster=h100_1x8", "training.global_batch_size=16"])
    strategy = LayerStrategy(1, 2, zero_stage=1)
    plan = Plan(8, (0, 9, 18, 27, 35), (strategy,) * 35)
    cost = evaluate(plan, problem)
    used, last = cost.memory_bytes, cost.memory_bytes[-1]
    assert max(used) > 1.4 * last

    def found(share: float, ranks: range) -> list[str]:
        trial = Trial("log", plan, cost.iteration_time_s, share * last, ranks)
        return [own.quantity for own in deviations(problem, trial)]

    assert found(1.0, range(0)) == ["peak bytes"]
    assert found(1.0, range(6, 8)) == found(1.0, range(8)) == found(1.2, range(8)) == []
    assert found(0.3, range(8)) == found(4.0, range(8)) == found(1.0, range(2)) == ["peak bytes"]
    middle = Trial("log", plan, cost.iteration_time_s, 0.5 * (max(used) + min(used)), range(8))
    assert peak_stage(middle, problem) is None


def test_a_peak_is_of_the_fullest_stage_or_above_or_below_all_that_it_may_be_of() -> None:
    problem = load_problem(["model=toy", "training=toy", "cluster=toy", "space.pp=4"])
    plan = Plan(4, (0, 2, 3, 4, 7), (LayerStrategy(1, 2),) * 7)
    used = evaluate(plan, problem).memory_bytes
    order = sorted(range(4), key=used.__getitem__)
    size = problem.cluster.num_devices // 4
    for first, last in combinations(order, 2):
        ranks = tuple(problem.cluster.pipeline_ranks[stage * size] for stage in (first, last))
        low, high = used[first], used[last]
        cases = ((high, last), (2 * high, last), (low, first), (low / 2, first))
        for peak, stage in (*cases, ((low + high) / 2, None)):
            trial = Trial("log", plan, 1.0, peak, ranks=ranks)
            assert peak_stage(trial, problem) == stage
    # without ranks it is the largest peak of all
    for peak in (used[order[0]] / 2, 2 * used[order[-1]]):
        assert peak_stage(Trial("log", plan, 1.0, peak), problem) == order[-1]
