"""The programme, the descent and the command on small graphs."""

import json
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from darts_parallel.cost.collectives import all_reduce, reduce_scatter
from darts_parallel.cost.compute import gemm_seconds, stream_seconds
from darts_parallel.errors import ConfigError, InfeasibleError, UnsupportedError
from darts_parallel.graph._mesh import Step
from darts_parallel.graph._prices import product_shape
from darts_parallel.graph._programme import GraphProgramme, ProgrammeAnswer
from darts_parallel.graph._rules import splits, unknown_operators
from darts_parallel.graph._space import GraphSpace
from darts_parallel.graph._states import PARTIAL, axis_moves, shard
from darts_parallel.graph.capture import capture_module, make_inputs
from darts_parallel.graph.command import run_request
from darts_parallel.graph.descent import DescentAnswer, descend
from darts_parallel.graph.operators import GROUPED, PARAMETER, RELAY
from darts_parallel.graph.plan import GraphPlan, plan_graph, plan_module
from darts_parallel.graph.report import _descent_line, _split_lines, claim
from darts_parallel.problem.layer_spec import Gemm
from tests.graph.running import STEEP, mesh, on_meta


class Gated(nn.Module):
    def __init__(self, hidden: int = 512) -> None:
        super().__init__()
        self.a = nn.Linear(hidden, hidden, bias=False)
        self.b = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(torch.relu(self.a(x)))


def space(hidden: int = 512, *ranks: int, tokens: int = 512, **options: Any) -> GraphSpace:
    graph = on_meta(lambda: Gated(hidden), [4, tokens, hidden])
    return GraphSpace(graph, mesh(*(ranks or (2,))), **options)


def changed(
    one: GraphSpace, plan: tuple[int, ...], groups: Sequence[int]
) -> Iterator[tuple[int, ...]]:
    """Yield a plan with all choices of some groups."""
    for picks in product(*(range(len(one.groups[g].choices)) for g in groups)):
        new = dict(zip(groups, picks, strict=True))
        yield tuple(new.get(g, k) for g, k in enumerate(plan))


@pytest.mark.parametrize("hidden", [512, 2048])
def test_the_programme_is_as_fast_as_every_plan_that_can_be_counted(hidden: int) -> None:
    """Enumerate the operators and relays next to the weights that the programme chose."""
    one = space(hidden)
    answer = GraphProgramme(one).solve()
    kinds = ("linear", "add", "relu", "relay")
    free = [g for g, group in enumerate(one.groups) if group.operators[0].op in kinds]
    best = min(map(one.total_seconds, changed(one, answer.assignment, free)))
    assert answer.seconds == pytest.approx(best, rel=1e-6)
    assert answer.lp_seconds <= best * (1.0 + 1e-9)
    assert 0.0 < answer.solve_seconds < 60.0


@pytest.mark.parametrize(("hidden", "memory"), [(512, None), (2048, None), (2048, 0.012)])
def test_the_descent_on_pairs_ends_at_the_programme(hidden: int, memory: float | None) -> None:
    """Half a percent at most."""
    # 1,024 tokens: on 512, where latencies are most of a plan's seconds, it ends up to 30 % above
    limit = memory and memory * hidden / 512 * 2.0**30
    one = space(hidden, 4, tokens=1024, memory=limit)
    answer, best = descend(one), GraphProgramme(one).solve()
    assert answer.fits
    assert best.seconds * (1.0 - 1e-6) <= answer.seconds <= best.seconds * 1.005
    assert answer.seconds == one.total_seconds(answer.assignment)


@pytest.mark.parametrize("half_size", [0, 512])
def test_megatrons_template_costs_what_the_projects_formulas_say(half_size: int) -> None:
    """Two products split by column and row, one all-reduce forward and one backward, to 1e-9."""
    job = [*STEEP, f"cluster.devices.h100.divided_half_size={half_size}"]
    # as wide as pays for two latencies
    gemms = Gemm(16384, 4096, "column"), Gemm(4096, 16384, "row")
    linears = (nn.Linear(gemm.in_features, gemm.out_features, bias=False) for gemm in gemms)
    graph = on_meta(lambda: nn.Sequential(*linears), [2, 2048, 4096])
    plan = plan_graph(graph, mesh(8, job=job)).plan
    own, one = plan.space.mesh, torch.ones(1, dtype=torch.float64)
    products = sum(
        float(gemm_seconds(gemm, 4096.0 * one, 8.0 * one, own.device, 2)) for gemm in gemms
    )
    moved = float(all_reduce(2.0 * 4096 * 4096 * one, own.groups[0]))
    assert plan.seconds == pytest.approx(3.0 * products + 2.0 * moved, rel=1e-9)


def test_a_frozen_parameter_has_no_gradient_and_no_product_for_it() -> None:
    def pair(frozen: bool) -> nn.Module:
        both = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
        both[1].weight.requires_grad_(not frozen)
        return both

    passes = []
    for frozen in (False, True):
        graph = on_meta(partial(pair, frozen), [8, 64])
        products = [op for op in graph.operators if op.op == "linear"]
        passes.append([graph.gradients(op.inputs[:2]) for op in products])
    assert passes == [[2, 2], [2, 1]]


def test_collectives_cost_what_the_projects_formulas_say() -> None:
    one = mesh(2, 4, job=[*STEEP, "cluster.devices.h100.collective_start_us=30"])
    size = torch.tensor([1e6], dtype=torch.float64)
    for axis in (0, 1):
        group = one.groups[axis]
        # a pair of them starts as an all-reduce does
        half = 15e-6 + float(reduce_scatter(size, group))
        assert one.seconds(Step(axis, "all_gather", 1e6)) == pytest.approx(half, rel=1e-12)
        assert one.seconds(Step(axis, "all_reduce", 1e6)) == pytest.approx(2 * half, rel=1e-12)
    assert one.seconds(Step(0, "all_to_all", 1e6)) < one.seconds(Step(0, "all_gather", 1e6))
    assert one.steps(("P", "S0"), ("R", "R"), 8.0) == [
        Step(0, "all_reduce", 2.0),
        Step(1, "all_gather", 8.0),
    ]


class SortedExperts(nn.Module):
    """Four experts and the rows of each, one expert after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.empty(4, 512, 1024, dtype=torch.bfloat16))

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        return functional.grouped_mm(x.bfloat16(), self.weights, offs=ends.int())


def test_grouped_products_cost_those_of_equal_shares_of_the_rows_on_every_expert() -> None:
    own = mesh(2, job=[*STEEP, "cluster.devices.h100.grouped_gemm_efficiency=0.8"])
    graph = on_meta(SortedExperts, [64, 512], [4, "long"])
    prices = GraphSpace(graph, own).prices
    (op,) = [op for op in graph.operators if op.op in GROUPED]
    gemm = Gemm(1024, 512, "column")
    for rows, each in ((64, 16.0), (2, 1.0)):  # an expert has a row at least
        size = torch.full((1,), each, dtype=torch.float64)
        product = float(gemm_seconds(gemm, size, torch.ones(1), own.device, 2))
        for experts in (4, 2):  # on a rank
            shapes = [(rows, 512), (experts, 512, 1024), (4,)]
            found = prices.seconds(op, shapes, [(rows, 1024)])
            assert found == pytest.approx(3.0 * experts * product / 0.8, rel=1e-9)


def test_ties_make_collectives_and_split_parameters_alone_more_expensive() -> None:
    programme = GraphProgramme(space())
    cost, tied = np.array(programme.cost), programme.tied_costs()
    assert ((tied > cost)[programme.whole :] == (cost > 0.0)[programme.whole :]).all()
    assert (tied >= cost).all()
    for first, group in zip(programme.first, programme.space.groups, strict=True):
        for number, choice in enumerate(group.choices, first):
            split = group.operators[0].op in (PARAMETER, RELAY) and "none" not in choice.labels
            assert bool(tied[number] > cost[number]) == split


@pytest.mark.parametrize("groups", [1, 2, 8])
def test_a_convolution_is_a_product_for_each_of_its_groups(groups: int) -> None:
    """Every pixel of every image is a row; an output channel sees the inputs of its group."""
    graph = on_meta(lambda: nn.Conv2d(8, 16, 3, padding=1, groups=groups), [2, 8, 10, 10])
    (op,) = [op for op in graph.computing if op.op.startswith("conv")]
    shape = product_shape(op, graph.shapes(op.inputs), graph.shapes(op.outputs)[0])
    gemm = Gemm(16 // groups, 8 // groups * 9, "column")
    assert (shape.rows, shape.weights, shape.count) == (2 * 10 * 10, gemm, groups)


class Elementwise(nn.Module):
    """Three operators on every element, of which the second may be returned, too."""

    def __init__(self, both: bool) -> None:
        super().__init__()
        self.both = both

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        gate = torch.sigmoid(functional.gelu(x))
        made = x * gate
        return (made, gate) if self.both else (made,)


@pytest.mark.parametrize(("both", "moved"), [(False, 2), (True, 5)])
def test_operators_of_one_kernel_read_and_write_memory_once(both: bool, moved: int) -> None:
    """A value that is returned ends the kernel: the next one reads it, and its other input again."""
    graph = on_meta(lambda: Elementwise(both), [1024, 1024])
    own = mesh(2)
    prices = GraphSpace(graph, own).prices
    seconds = 0.0
    for op in graph.computing:
        shapes = [(1024, 1024)] * len(op.inputs)
        seconds += prices.seconds(op, shapes, [(1024, 1024)], training=False)
    size = torch.full((1,), 2.0 * moved * 1024**2, dtype=torch.float64)
    expected = float(stream_seconds(own.device.streaming_factor * size, own.device))
    assert seconds == pytest.approx(expected, rel=1e-6)


def test_an_axis_that_splits_parts_of_another_is_gathered_first() -> None:
    assert axis_moves(("S0", "S0"), ("R", "R")) == [(1, "S0", "R"), (0, "S0", "R")]
    assert axis_moves(("R", "R"), ("S0", "S0")) == [(0, "R", "S0"), (1, "R", "S0")]
    assert axis_moves(("R", "S0"), ("S0", "S0")) == [(1, "S0", "R"), (0, "R", "S0"), (1, "R", "S0")]
    assert axis_moves(("S0", "S1"), ("S1", "S0"))[0] == (0, "S0", "R")


@pytest.mark.parametrize(
    ("shapes", "said"),
    [
        ([3], "list a shape for each input"),
        ([[]], "have a size for each dimension"),
        ([[2, "word"]], "the type word must be one of float"),
        ([[2, 0]], "the size 0 must be a whole number"),
        ([[2, True]], "the size True must be a whole number"),
    ],
)
def test_inputs_that_are_no_shapes_are_refused(shapes: list[Any], said: str) -> None:
    with pytest.raises(ConfigError, match=rf"^inputs=.*{said}.*; try "):
        make_inputs(shapes)


def test_parameters_inputs_and_outputs_compute_nothing() -> None:
    graph = on_meta(lambda: nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)), [8, 64])
    assert [op.op for op in graph.computing] == ["linear", "gelu", "linear"]


@pytest.mark.parametrize(
    ("tight", "proven", "said"),
    [
        (True, True, "no plan of the space is faster (the linear relaxation is whole)"),
        (False, True, "no plan of the space is faster (the integer program is solved)"),
        (False, False, "at most 25.00 % above the linear relaxation"),
    ],
)
def test_a_claim_is_what_the_programme_has_proven(tight: bool, proven: bool, said: str) -> None:
    assert claim(ProgrammeAnswer((), 1.25, 1.0, tight, proven, 0.0, 0)).startswith(said)


def test_too_little_memory_is_refused() -> None:
    with pytest.raises(
        InfeasibleError, match=r"try memory=\S+, which holds all tensors"
    ) as refused:
        GraphProgramme(space(memory=1e5)).solve()
    enough = float(str(refused.value).partition("try memory=")[2].partition(",")[0])
    assert GraphProgramme(space(memory=1.01 * enough * 2**30)).solve().proven


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return x
        return -x


class LeavingLinear(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tensor(x.detach().numpy().mean())


class Loud(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("word " * 100)


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (
            nn.Sequential(nn.Linear(3, 4), nn.Linear(5, 6)),
            r"it, in 1 \(Linear\) .*try inputs of the shapes",
        ),
        (Branching(), r"its control flow depends on data at .*test_programme.py:\d+ in forward"),
        (LeavingLinear(), r"test_programme.py:\d+ in forward .*try torch's own operators"),
        (Loud(), r"word \.\.\.\); try"),
        (nn.Embedding(3, 4), "try whole numbers"),
    ],
)
def test_a_module_that_does_not_export_is_refused_with_the_part_that_fails(
    module: nn.Module, words: str
) -> None:
    with pytest.raises(UnsupportedError, match=words):
        capture_module(module.to("meta"), make_inputs([[2, 3]]))


def test_a_plan_is_over_the_memory_by_what_it_keeps_more() -> None:
    free, answer = space(), GraphProgramme(space()).solve()
    kept = free.memory_bytes(answer.assignment)
    assert free.excess_bytes(answer.assignment) == 0.0
    assert space(memory=kept - 8.0).excess_bytes(answer.assignment) == 8.0
    assert space(memory=kept + 8.0).excess_bytes(answer.assignment) == 0.0


def test_blocks_of_four_operators_choose_together() -> None:
    """A weight, a bias, a product and a function are the smallest block."""
    graph = on_meta(lambda: nn.Sequential(*(Small() for _ in range(3))), [4, 64])
    groups = GraphSpace(graph, mesh(2)).groups
    linear = [group for group in groups if group.operators[0].op == "linear"]
    assert [len(group.operators) for group in linear] == [3]


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x).relu()


def test_the_report_tells_descent_from_coordinate_descent() -> None:
    plan = GraphPlan(space(), GraphProgramme(space()).solve().assignment)
    found = DescentAnswer(plan.assignment, 1.5 * plan.seconds, 1.25 * plan.seconds, False, 1.0)
    line = _descent_line(plan, found)
    assert "25.00 % above (50.00 % before coordinate descent, over the memory)" in line


def test_the_operators_of_a_report_share_all_seconds() -> None:
    one = space()
    lines = _split_lines(GraphPlan(one, GraphProgramme(one).solve().assignment))
    shares = [float(line.split()[0]) for line in lines]
    assert len(shares) == 4
    assert shares == sorted(shares, reverse=True)
    assert sum(shares) == pytest.approx(100.0, abs=0.2)


class Unknown(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.kthvalue(2)[0].sum()


@pytest.mark.parametrize(("groups", "split"), [(4, True), (3, False)])
def test_ranks_share_channels_where_they_divide_the_groups(groups: int, split: bool) -> None:
    graph = on_meta(lambda: nn.GroupNorm(groups, 12), [2, 12, 16])
    (op,) = graph.of_kind("group_norm")
    labels = {one.label for one in splits(op, graph, 2)}
    assert ("groups" in labels, "batch" in labels) == (split, True)


@pytest.mark.parametrize(("rounding", "linear"), [(None, True), ("floor", False)])
def test_sums_go_through_a_quotient_that_is_not_rounded(rounding: str | None, linear: bool) -> None:
    class Quotient(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return torch.div(x, y, rounding_mode=rounding)

    graph = on_meta(Quotient, [4, 8], [4, 8])
    (op,) = graph.of_kind("div")
    assert ("partial" in {one.label for one in splits(op, graph, 2)}) == linear


@pytest.mark.parametrize(("reduction", "partial"), [("sum", True), ("mean", True), ("amax", False)])
def test_ranks_with_a_part_of_a_sum_hold_partial_sums(reduction: str, partial: bool) -> None:
    class Reduced(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return getattr(torch, reduction)(x, 1)

    graph = on_meta(Reduced, [4, 8])
    (op,) = graph.of_kind(reduction)
    made = {one.states[0]: one.states[1] for one in splits(op, graph, 2)}
    assert made[shard(0)] == shard(0)
    assert made.get(shard(1)) == (PARTIAL if partial else None)


def test_an_operator_without_a_rule_is_replicated_and_reported() -> None:
    planned = plan_module(Unknown(), make_inputs([[2, 64, 64]]), mesh(2))
    unknown = unknown_operators(planned.graph)
    assert unknown
    assert all(planned.plan.choice(op).labels in (("none",), ("none*",)) for op in unknown)


def test_the_command_writes_what_outside_checks_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "user_block.py").write_text(
        "from torch import nn\n\n\ndef make():\n    return nn.Sequential(nn.Linear(64, 128), nn.ReLU())\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    arguments = [
        "module=user_block:make",
        "inputs=[[8,64]]",
        "mesh=[2]",
        f"hydra.run.dir={tmp_path / 'run'}",
    ]
    lines = run_request(arguments)
    data = json.loads((tmp_path / "run/graph.json").read_text())
    wanted = {
        "operators",
        "collectives",
        "raw_s",
        "improved_s",
        "lp_s",
        "claim",
        "unknown_operators",
    }
    assert wanted <= set(data)
    assert data["improved_s"] == pytest.approx(data["lp_s"], rel=1e-6)
    for one in data["collectives"]:
        assert one["of"] in ("activation", "parameter")
        assert one["pass"] in ("forward", "backward")
    drawn = (tmp_path / "run/graph.dot").read_text()
    assert drawn.startswith("digraph plan {")
    assert drawn.count("fillcolor") > 1
    assert drawn.count(" -> ") == drawn.count("color=gray") + drawn.count("color=red") > 0
    assert any("no plan of the space is faster" in line for line in lines)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["inputs=[[2]]"], "module must be given"),
        (["module=a:b"], "inputs must be given"),
        (["module=a:b", "inputs=[[2]]", "memory=-1"], "at least"),
        (["module=a:b", "inputs=[[2]]", "time_limit=0"], "time_limit=0 must be at least"),
        (["module=a:b", "inputs=[[2]]", "ends=half"], "one of replicated, free"),
        (["module=a:b", "inputs=[[2]]", "wrong=1"], "is not a key"),
        (["module=a:b", "inputs=[[2]", "mesh=[2]"], "cannot be read"),
        (["module=json", "inputs=[[2]]"], "package.file:function"),
        (["module=json:nothing", "inputs=[[2]]"], "has no function nothing"),
        (["module=nowhere.at_all:f", "inputs=[[2]]"], "cannot be imported"),
        (["module=json:JSONDecoder", "inputs=[[2]]"], "must return a torch.nn.Module"),
        (["module=json:dumps", "inputs=[[2]]"], "fails"),
        (["module=json:dumps", "inputs=[[2,half]]"], "one of float"),
        (["module=json:dumps", "inputs=[[2,0]]"], "whole number from 1"),
        (["module=json:dumps", "inputs=[[2]]", "mesh=[2,2,2]"], "one or two axes"),
        (["module=json:dumps", "inputs=[[2]]", "mesh=[64]"], r"has 8 GPUs; try \[8\]"),
        (
            ["module=json:dumps", "inputs=[[2]]", "gpus=64"],
            "of which this cluster has 8; try nodes=8",
        ),
        (["module=json:dumps", "inputs=[[2]]", "gpus=2", "mesh=[4]"], r"has 2 GPUs; try \[2\]"),
        (["tp=2"], r"tp=2 must be said by mesh or inputs; try mesh=\[2\]"),
        (["pp=2"], "of the command that plans"),
        (["module=a:b", "inputs=[[2]]", "training.seq_len=8"], "of the command that plans"),
        (["module=json:dumps", "inputs=[[2]]", "mesh=[1]"], "must have two ranks or more"),
        (["module=json:dumps", "inputs=[[2]]", "cluster=nowhere"], "must name a file"),
    ],
)
def test_bad_input_is_one_sentence(arguments: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        run_request(arguments)
    assert str(caught.value).count("\n") == 0
    assert "try" in str(caught.value)


def test_the_solver_of_older_versions_of_scipy_reads_the_matrix() -> None:
    """Before 1.15 it takes indices of 32 bits alone."""
    matrix, _, _ = GraphProgramme(space()).constraints()
    assert {matrix.indices.dtype, matrix.indptr.dtype} == {np.dtype(np.int32)}


def test_products_of_a_batch_and_of_a_vector_have_their_own_sizes() -> None:
    class BatchAndVector(nn.Module):
        def forward(self, x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
            return torch.matmul(x, y), torch.matmul(y, z)

    graph = capture_module(BatchAndVector(), make_inputs([[2, 3, 4], [2, 4, 5], [5]]))
    shapes = []
    for op in graph.operators:
        if op.op in ("matmul", "bmm", "mv"):
            inputs = [graph.values[name].shape for name in op.inputs]
            shapes.append(product_shape(op, inputs, graph.values[op.outputs[0]].shape))
    assert [
        (own.rows, own.weights.in_features, own.weights.out_features, own.count) for own in shapes
    ] == [
        (3.0, 4, 5, 2),
        (8.0, 5, 1, 1),
    ]
