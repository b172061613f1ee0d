"""The report on the terminal: at most 32 lines for the default job, and 40 for any."""

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

import darts_parallel
from darts_parallel import DartsParallelError, load_problem, plan
from darts_parallel.cost.evaluation import evaluate
from darts_parallel.planner import Rung
from darts_parallel.report.ending import render_ladder
from darts_parallel.report.format import rank_ranges
from darts_parallel.report.outcome import Outcome
from darts_parallel.report.screen import _job_notes, _times, mask_note
from darts_parallel.report.stages import stage_table
from darts_parallel.report.text import claim
from tests.report.conftest import FoundPlan
from tests.support.screen import REPORT, default_lines, printed, report_page

FEW = ["search.num_steps=20", "search.num_restarts=4", "output.tensorboard=false"]


def test_the_default_job_prints_at_most_32_lines_and_report_md_shows_them(tmp_path: Path) -> None:
    lines = default_lines(tmp_path)
    assert len(lines) <= 32, "\n".join(lines)
    assert "best found" in lines[3] or "optimal in the model" in lines[3]
    assert lines[5].endswith(
        "averages of measured runs: attention_kernel, tp_comm_overlap, compiled"
    )
    assert REPORT.read_text(encoding="utf-8") == report_page(lines), (
        "python -m tests.support.screen"
    )


def test_the_report_says_how_much_of_the_mfu_lies_outside_of_the_causal_mask() -> None:
    """Case 19: 27.9 GFLOP a token with all scores, and 23.0 as Megatron-LM counts."""
    job = ["model=qwen3_30b_a3b", "cluster=h100_8x8", "gbs=128"]
    (note,) = notes_of([*job, "seq=4096"])
    less = float(note.removesuffix(" % lower").rpartition(" ")[2])
    assert less == pytest.approx(100 * (1.0 - 23.0 / 27.9), abs=0.5)
    assert notes_of([*job, "seq=512"]) == []
    assert (
        notes_of(["model=bert_345m", "cluster=h100_8x8", "seq=4096", "model.max_seq_len=4096"])
        == []
    )


def notes_of(overrides: list[str]) -> list[str]:
    note = mask_note(load_problem(overrides))
    return [note] if note else []


def test_the_table_of_risks_says_where_the_safe_plan_is_faster_too() -> None:
    problem = load_problem(["model=toy", "training=toy", "cluster=toy", *FEW])
    found = plan(problem).plan
    for seconds, said in ((0.995, True), (1.0, False), (1.02, False)):
        rungs = [Rung("safe", found, seconds, 0.01), Rung("chosen", found, 1.0, 0.15)]
        console = Console(width=100, record=True, file=StringIO())
        render_ladder(rungs, console)
        words = "safe is faster, too: seconds within search.tie of each other count as equal"
        assert (words in console.export_text()) == said


def test_many_ranges_leave_room_for_the_other_columns() -> None:
    """Two kinds of stages that alternate, 32 in all, had a table without columns."""
    assert rank_ranges(range(1, 32, 2)) == "1,…,31"
    assert rank_ranges([*range(32, 320), *range(384, 704), 768]) == "32-319,…,768"
    assert rank_ranges([*range(192, 768), *range(832, 1984)]) == "192-767,832-1983"
    assert rank_ranges([0, 2, 4, 5, 7]) == "0,2,4-5,7"
    assert rank_ranges([*range(1, 10), *range(12, 22), *range(24, 31)]) == "1-9,…,24-30"


JOBS = {
    "many stages": ["space=uniform", "space.pp=32", "search=exact"],
    "experts": ["model=mixtral_8x7b", "cluster=h100_8x8", "space=uniform", "search=exact"],
    "mixed devices": [
        "model=toy",
        "cluster=toy_mixed",
        "training=toy",
        "verification.enabled=false",
        *FEW,
    ],
    "a trainer": ["model=llama3_8b", "cluster=h100_8x8", "trainer=megatron", "search=exact"],
    "chunks": [
        "model=toy",
        "cluster=toy",
        "training=toy",
        "space.pp=2",
        "space.virtual_stages=2",
        "verification.enabled=false",
        *FEW,
    ],
    "no plan keeps the risk": [
        "model=toy",
        "cluster=toy",
        "training=toy",
        "cluster.devices.toy.memory_GiB=0.104",
        *FEW,
    ],
}


@pytest.mark.parametrize("job", JOBS)
def test_any_job_prints_at_most_40_lines(
    job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if job == "many stages":  # three different lines: first, middle, last
        monkeypatch.setattr("darts_parallel.report.stages.MOST_STAGES", 2)
    lines = printed(
        ["verification.max_seconds=5", *JOBS[job], "output.tensorboard=false"], tmp_path
    )
    assert len(lines) <= 40, "\n".join(lines)
    assert (" more in report.html" in "\n".join(lines)) == (job == "many stages")
    assert ("no plan keeps space.out_of_memory" in lines[3]) == (job == "no plan keeps the risk")


def test_equal_stages_share_a_line(found: FoundPlan) -> None:
    cost = replace(
        evaluate(found.plan, found.problem),
        stage_times_s=(1.0, 2.0, 2.0, 1.0),
        memory_bytes=(1e8,) * 4,
        capacity_bytes=(2e8,) * 4,
    )
    plan = replace(found.plan, boundaries=(0, 2, 3, 4, 6), layers=found.plan.layers[:1] * 6)
    table = stage_table(Outcome(found.problem, plan, cost))
    assert list(table.columns[0].cells) == ["0", "1-2", "3"]
    assert str(list(table.columns[2].cells)[1]) == "layers 1-2"


def test_the_line_of_causes_sums_to_the_iteration_where_a_cause_is_below_zero(
    found: FoundPlan,
) -> None:
    """A cost term of -0.64 ms was left out: 6.4 ms and 0.1 ms stood next to 5.85 ms."""
    causes = {"compute": 12.0, "optimizer": 0.0125, "shared:clocks": -0.6}
    cost = replace(found.cost, iteration_time_s=11.4125, breakdown_s=causes)
    line = _times(Outcome(found.problem, found.plan, cost))
    assert line == "12.00 s compute · -0.600 s shared:clocks · 12.5 ms others"


def test_an_mfu_above_100_percent_is_called_a_contradiction(found: FoundPlan) -> None:
    cost = evaluate(found.plan, found.problem)
    for mfu, contradicts in ((0.99, False), (1.44, True)):
        notes = _job_notes(Outcome(found.problem, found.plan, replace(cost, mfu=mfu)))
        assert ("contradicts the peak" in " ".join(notes)) == contradicts


@pytest.mark.parametrize(
    ("targets", "words"), [("linear_qkv", ", fused qkv and fc1)"), ("linear_proj", ")")]
)
def test_the_count_of_adapters_says_that_products_are_fused(targets: str, words: str) -> None:
    """PEFT has adapters of query, key, value, gate and up: 41.9 million where 35.7 are counted."""
    lora = ["training.lora_rank=2", f"training.lora_targets=[{targets}]"]
    best = plan(load_problem(["model=toy", "cluster=toy", "training=toy", *lora, *FEW]))
    first = str(best).splitlines()[0]
    assert f"{best.outcome.problem.model.num_trained_parameters:,} trained{words} on " in first


def test_python_prints_saves_and_exports_the_plan(tmp_path: Path) -> None:
    problem = load_problem(["model=toy", "cluster=toy", "training=toy", "space=uniform", *FEW])
    best = plan(problem)
    lines = str(best).splitlines()
    assert 5 <= len(lines) <= 7
    assert lines[1] == best.plan.describe(problem.training.global_batch_size)
    assert claim(best.outcome.problem, best.outcome.cost, best.answers) in lines
    assert best._repr_html_().startswith("<!DOCTYPE html>")
    data = json.loads(best.save(tmp_path / "new").read_text())
    assert data["predicted"]["iteration_time_s"] == best.result.iteration_time_s
    assert (tmp_path / "new" / "report.html").exists()
    assert best.export("torch").files
    taken = tmp_path / "new" / "plan.json"
    with pytest.raises(
        DartsParallelError, match=r"plan\.json cannot be written \(Not a directory\)"
    ):
        best.save(taken)
    with pytest.raises(DartsParallelError, match=r"trainer=megatron-lm must be .* try megatron\."):
        best.export("megatron-lm")


def test_a_plan_is_saved_below_the_users_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder of the name `~` was made."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    best = plan(load_problem(["model=toy", "cluster=toy", "training=toy", "space=uniform", *FEW]))
    assert best.save("~/new") == tmp_path / "home/new/plan.json"
    assert not (tmp_path / "~").exists()


def test_a_text_in_place_of_a_problem_is_refused_in_one_sentence() -> None:
    with pytest.raises(DartsParallelError, match=r"must get a problem; try plan\(load_problem"):
        plan("model=llama3_8b")
    problem = load_problem(["model=toy", "cluster=toy", "training=toy"])
    with pytest.raises(
        DartsParallelError, match=r"evaluate\(Problem, \.\.\.\) must get a Plan; try"
    ):
        evaluate(problem, problem)
    with pytest.raises(DartsParallelError, match="must be a list of texts; try"):
        load_problem(["model=toy", 5])  # type: ignore[list-item]
    with pytest.raises(DartsParallelError, match=r"must be a list; try \['model=toy', 'tp=2'\]"):
        load_problem("model=toy tp=2")


def test_a_plan_is_not_read_as_the_problem_of_the_default_job() -> None:
    """`load_problem(["plan=FILE"])` gave Llama 2 7B on 32 A10, whatever the plan was of."""
    with pytest.raises(DartsParallelError, match=r"plan=own\.json must be read by Plan\.from_dict"):
        darts_parallel.load_problem(["plan=own.json"])


def test_the_public_names_are_listed_before_they_are_imported() -> None:
    names = dir(darts_parallel)
    assert {"plan", "load_problem", "evaluate", "DartsParallelError"} <= set(names)
    assert all(hasattr(darts_parallel, name) for name in names)
