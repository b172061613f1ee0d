import pytest

from darts_parallel.problem.problem import load_problem
from experiments.comparison.layouts import chunks_of, default_chunks, first_layers, megatron_default
from experiments.comparison.problems import schedule_suite


def test_layouts_are_read_as_megatron_reads_them_and_hold_every_block_of_their_model() -> None:
    chunks = chunks_of("Et*3|(tt|)*29,m|L")
    assert (len(chunks), chunks[0], set(chunks[1:30]), chunks[30:]) == (
        32,
        "Ettt",
        {"tt"},
        ["m", "L"],
    )
    assert chunks_of("Et*2|(tt|)*2tL") == ["Ett", "tt", "tt", "tL"]
    cases = [case for case in schedule_suite() if case.layout]
    assert len(cases) == 3
    for case in cases:
        assert first_layers(chunks_of(case.layout), case.problem.model.layers) is not None


@pytest.mark.parametrize(
    ("blocks", "stages", "wanted"),
    [
        (8, 4, ["Ett", "tt", "tt", "ttL"]),
        (6, 4, ["Et", "tt", "tt", "tL"]),
        (7, 4, ["Ett", "tt", "tt", "tL"]),
        (43, 8, ["E" + "t" * 6, *["t" * 6] * 6, "tL"]),
        (9, 8, None),
    ],
)
def test_the_default_is_even_or_counts_its_ends(
    blocks: int, stages: int, wanted: list[str] | None
) -> None:
    assert megatron_default(blocks, stages) == wanted


def test_stages_begin_where_the_layout_says_and_empty_chunks_are_no_plan() -> None:
    problem = load_problem(["model=toy", "training=toy", "cluster=toy", "model.num_layers=6"])
    layers = problem.model.layers
    chunks = default_chunks(layers, 2)
    assert first_layers(chunks, layers) == [0, 4]
    assert first_layers(chunks_of("Et*6||L"), layers) is None
    assert first_layers(chunks_of("Et*5|L"), layers) is None


def test_predictions_lie_with_the_loss_by_default_and_apart_where_a_layout_says_so() -> None:
    given = [
        "model=toy",
        "training=toy",
        "cluster=toy",
        "model.num_layers=6",
        "model.mtp_num_layers=1",
    ]
    layers = load_problem(given).model.layers
    assert default_chunks(layers, 2) == ["Ettt", "tttmL"]
    assert first_layers(chunks_of("Ett|t*4|m|L"), layers) == [0, 3, 7, 8]
