from pathlib import Path

import pytest
import torch

from darts_parallel.cost.evaluation import evaluate
from darts_parallel.errors import ConfigError
from darts_parallel.plans.strategy import LayerStrategy, Plan
from darts_parallel.problem.problem import Problem, load_problem

TOY = ["model=toy", "training=toy", "cluster=toy"]
SIZED = "source,model,gpu,tp,layer_index,layer_kind,forward_s,micro_batch,seq_len,backward_s,saved_bytes\n"


def write(path: Path, *rows: str, header: str = SIZED) -> Path:
    path.write_text(header + "".join(f"{row}\n" for row in rows), encoding="utf-8")
    return path


def profiled(path: Path, *more: str) -> Problem:
    own = ["cost=profiled", f"cost.profile={path}", "cost.profile_collectives=excluded"]
    return load_problem([*TOY, *own, *more])


@pytest.fixture
def block(tmp_path: Path) -> Path:
    return write(
        tmp_path / "block.csv",
        "x,toy,toy,1,1,transformer,0.010,1,64,0.030,1000",
        "x,toy,toy,1,1,transformer,0.016,2,64,0.050,1800",
        "x,toy,toy,2,1,transformer,0.006,1,64,0.020,600",
    )


def plan(tp: int, micro_batches: int) -> Plan:
    strategy = LayerStrategy(tp=tp, dp=8 // tp)
    return Plan(micro_batches, (0, 7), (strategy,) * 7)


def test_blocks_take_their_measured_seconds_and_other_layers_keep_the_formulas(block: Path) -> None:
    problem, analytic = profiled(block), load_problem(TOY)
    for count, seconds in ((2, 0.040), (1, 0.066)):  # micro-batches of 1 and 2 sequences on 8 ranks
        measured, formula = (evaluate(plan(1, count), p) for p in (problem, analytic))
        outside = [layer for layer in problem.model.layers if layer.kind != "block"]
        assert len(outside) == 3
        blocks = 4 * seconds
        rest = measured.breakdown_s["compute"] / count - blocks
        assert 0 < rest < formula.breakdown_s["compute"] / count


def test_layers_without_measured_times_are_named(block: Path) -> None:
    assert profiled(block).unmeasured == ["embedding", "head", "loss"]
    assert load_problem(TOY).unmeasured == []


@pytest.mark.parametrize(("kind", "count"), [("block", 1), ("experts", 3)])
def test_blocks_of_one_kind_take_their_measured_seconds(
    tmp_path: Path, kind: str, count: int
) -> None:
    path = write(tmp_path / "times.csv", f"x,toy_moe,toy,1,1,{kind},5.0,1,64,3.0,9")
    problem = profiled(path, "model=toy_moe")
    assert kind not in problem.unmeasured
    layers = problem.num_layers
    cost = evaluate(Plan(2, (0, layers), (LayerStrategy(tp=1, dp=8),) * layers), problem)
    assert cost.breakdown_s["compute"] == pytest.approx(2 * count * 8.0, abs=0.1)


def test_a_file_may_begin_with_a_mark_and_have_spaces_behind_commas(block: Path) -> None:
    lines = block.read_text(encoding="utf-8").splitlines()
    text = "\n".join(line.partition(",")[2].replace(",", ", ") for line in lines)
    block.write_text(f"\ufeff{text}", encoding="utf-8")  # the first column is one that is needed
    assert text.startswith("model, gpu")
    assert profiled(block).unmeasured == ["embedding", "head", "loss"]


def test_kept_bytes_are_measured_too(block: Path) -> None:
    problem, analytic = profiled(block), load_problem(TOY)
    strategy = LayerStrategy(tp=1, dp=8)
    tight = Plan(2, (0, 7), (strategy,) * 7)
    difference = (
        evaluate(tight, analytic).memory_bytes[0] - evaluate(tight, problem).memory_bytes[0]
    )
    block_bytes = (
        64 * 64 * 34
    )  # Korthikanti et al. 2022, equation 2, without the scores of fused attention
    assert difference == pytest.approx(4 * (block_bytes - 1000), rel=0.2)


def test_degrees_that_were_not_measured_leave_the_space(block: Path) -> None:
    from darts_parallel.plans.space import outer_spaces

    degrees = {c.tp for space in outer_spaces(profiled(block)) for c in space.choices}
    assert degrees == {1, 2}


def test_a_folder_of_forward_times_counts_backward_twice_and_applies_multipliers(
    tmp_path: Path,
) -> None:
    header = "source,model,gpu,tp,layer_index,layer_kind,forward_s\n"
    rows = [
        "x,Toy,TOY (card),1,0,embedding,0.001",
        *(f"x,Toy,TOY (card),1,{i},transformer,0.01" for i in (1, 2)),
    ]
    write(tmp_path / "layer_forward_seconds.csv", *rows, header=header)
    multipliers = "model,gpu,layer_kind,micro_batch,multiplier\n"
    write(
        tmp_path / "micro_batch_multipliers.csv",
        "Toy,TOY (card),transformer,1,1",
        "Toy,TOY (card),transformer,4,3",
        header=multipliers,
    )
    measured = profiled(tmp_path).measured
    assert measured is not None
    tp, sizes = torch.ones(3).double(), torch.tensor([[1.0, 2.5, 8.0]]).double()
    for name, expected in (("forward", [0.01, 0.02, 0.06]), ("backward", [0.02, 0.04, 0.12])):
        found = measured.figures("toy", "block", (tp, tp), sizes, name)
        assert found is not None
        assert found[0].tolist() == pytest.approx(expected)
        assert measured.figures("toy", "head", (tp, tp), sizes, name) is None


@pytest.mark.parametrize(
    ("row", "more", "sentence"),
    [
        (
            "x,toy,toy,1,1,transformer,0.01,1,128,0.03,9",
            [],
            "seq_len=128 must be training.seq_len=64",
        ),
        (
            "x,toy,toy,3,1,transformer,0.01,1,64,0.03,9",
            [],
            "must measure a legal tensor-parallel degree",
        ),
        (
            "x,other,toy,1,1,transformer,0.01,1,64,0.03,9",
            [],
            "cost.profile_model=toy must be one of other",
        ),
        (
            "x,toy,a10,1,1,transformer,0.01,1,64,0.03,9",
            [],
            "cost.profile_gpu=toy must be one of a10",
        ),
        (
            "x,toy,toy,1,1,transformer,0.01,1,64,0.03,9",
            ["cost.profile_gpu=h100"],
            "cost.profile_gpu=h100 must be one of toy",
        ),
        ("x,toy,toy,1,1,transformer,-1,1,64,0.03,9", [], "forward_s=-1 must be"),
        (
            "x,toy,toy,1,1,transformer,0.01,1,64,0.03,9",
            ["cost.profile=null"],
            "cost.profile=null must name",
        ),
        (
            "x,toy,toy,1,1,transformer,0.01,1,64,0.03,9",
            ["cost.profile=no/x.csv"],
            "cost.profile=no/x.csv must be a CSV file, or a folder that holds",
        ),
    ],
)
def test_bad_profiles_are_refused(tmp_path: Path, row: str, more: list[str], sentence: str) -> None:
    from darts_parallel.plans.space import outer_spaces

    path = write(tmp_path / "block.csv", row)
    with pytest.raises(ConfigError, match=sentence):
        outer_spaces(profiled(path, *more))


def test_collectives_inside_the_measured_times_are_not_added(block: Path) -> None:
    apart = evaluate(plan(2, 1), profiled(block))
    inside = evaluate(plan(2, 1), profiled(block, "cost.profile_collectives=included"))
    assert inside.breakdown_s["compute"] == apart.breakdown_s["compute"]
    measured = profiled(block, "cost.profile_collectives=included").measured
    assert measured is not None
    two, sizes = torch.full((1,), 2.0).double(), torch.ones(1, 1).double()
    for name in ("tp_forward", "tp_backward"):
        collectives = measured.figures("toy", "block", (two, two), sizes, name)
        assert collectives is not None
        assert collectives.tolist() == [[0.0]]
    # embedding and head were not measured
    assert 0.0 < inside.breakdown_s["tensor_parallel"] < apart.breakdown_s["tensor_parallel"]


def test_a_profile_says_itself_what_its_times_include(block: Path) -> None:
    unsaid = ["cost.profile_collectives=null"]
    with pytest.raises(ConfigError, match=r"at tp=2 include .* try cost.profile_collectives=incl"):
        profiled(block, *unsaid)
    lines = block.read_text(encoding="utf-8").splitlines()
    rows = [f"{lines[0]},collectives", *(f"{line},included" for line in lines[1:])]
    block.write_text("\n".join(rows), encoding="utf-8")
    said = evaluate(plan(2, 1), profiled(block, *unsaid))
    told = evaluate(plan(2, 1), profiled(block, "cost.profile_collectives=included"))
    assert said == told
    block.write_text("\n".join(rows).replace("included", "maybe"), encoding="utf-8")
    with pytest.raises(ConfigError, match="collectives=maybe must be included or excluded"):
        profiled(block, *unsaid)
