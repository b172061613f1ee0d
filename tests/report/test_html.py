import re
from dataclasses import replace
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from darts_parallel import evaluate, load_problem
from darts_parallel.cli._job import Job
from darts_parallel.planner import time_elasticities
from darts_parallel.plans.strategy import Plan
from darts_parallel.problem.problem import Problem
from darts_parallel.report import render, report_page
from darts_parallel.report.outcome import Outcome
from darts_parallel.schedules import find
from tests.report.conftest import FoundPlan

TOY = ["model=toy", "cluster=toy", "training=toy"]


class ParsedPage(HTMLParser):
    """Checks that every element is closed in order, and collects elements and words."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self.open += [] if tag == "meta" else [tag]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += " ".join(data.split()) + " "


def page(found: FoundPlan, problem: Problem | None = None, plan: Plan | None = None) -> str:
    problem, plan = problem or found.problem, plan or found.plan
    result = found.result if plan == found.plan else None
    elasticities = time_elasticities(plan, problem)
    outcome = Outcome(problem, plan, evaluate(plan, problem), result, [], elasticities)
    tables = render(outcome, Console(file=StringIO(), width=100))
    commands = ["start it: darts-parallel plan=a&b.json", "no trainer has two batches"]
    return report_page(outcome, tables, commands)


def test_the_page_is_whole_without_network_or_script_and_names_from_outside_are_words(
    found: FoundPlan,
) -> None:
    config = found.problem.config
    name = "<script>alert(1)</script>&amp;[red]"
    hostile = replace(config, model=replace(config.model, name=name))
    text = page(found, replace(found.problem, config=hostile))
    shown = ParsedPage(text)
    assert not {"script", "link", "img", "iframe"} & {tag for tag, _ in shown.found}
    assert all(words in shown.words for words in (name, "a&b.json"))
    links = [
        value or ""
        for _, own in shown.found
        for key, value in own.items()
        if key in ("href", "src")
    ]
    assert [link.partition(",")[0] for link in links] == ["data:image/png;base64"] * 2
    assert set(re.findall(r"https?://[^\s\"<]+", text)) == {"http://www.w3.org/2000/svg"}


def test_the_bars_of_a_stage_sum_to_its_memory_and_their_spread_is_that_of_plan_json(
    found: FoundPlan,
) -> None:
    shown = ParsedPage(page(found))
    rects = (own for tag, own in shown.found if tag == "rect")
    parts = [own for own in rects if (own["y"], own["height"]) == ("1.00", "14.00")]
    most, bars = max(found.cost.capacity_bytes), 5
    assert len(parts) == bars * found.plan.pp
    for stage, used in enumerate(found.cost.memory_bytes):
        capacity, *terms = (
            float(own["width"] or 0) for own in parts[bars * stage : bars * (stage + 1)]
        )
        assert sum(terms) == pytest.approx(260 * used / most, abs=0.03)
        assert capacity == pytest.approx(260 * found.cost.capacity_bytes[stage] / most, abs=0.01)
    plan = found.plan.describe(found.problem.training.global_batch_size)
    for words in (
        plan,
        "edges harden",
        "1f1b, one iteration",
        "Stages",
        "Alternatives",
        "Next commands",
    ):
        assert words in shown.words


def test_sentences_are_not_written_as_commands(found: FoundPlan) -> None:
    text = page(found)
    assert "<pre>darts-parallel plan=a&amp;b.json</pre>" in text
    assert '<p class="note">no trainer has two batches</p>' in text
    assert text.count("<pre>") == 1


def test_lines_are_escaped_and_every_stage_has_the_spread_of_its_own_memory(
    found: FoundPlan,
) -> None:
    elasticities = time_elasticities(found.plan, found.problem)
    outcome = Outcome(
        found.problem,
        found.plan,
        found.cost,
        elasticities=elasticities,
        assumed=["gbs < 8 & <b>"],
    )
    assert outcome.sure is not None
    tables = render(outcome, Console(file=StringIO(), width=100))
    text = report_page(outcome, tables, [])
    assert '<p class="yellow">gbs &lt; 8 &amp; &lt;b&gt;</p>' in text
    most = max(*found.cost.capacity_bytes, *found.cost.memory_bytes)
    ends = re.findall(r'd="M([\d.]+) 4v8m0-4H([\d.]+)m0-4v8"', text)
    wanted = [
        [min(260, 260 * value / most) for value in pair] for pair in outcome.sure.memory_bytes
    ]
    assert [[float(x) for x in pair] for pair in ends] == [
        pytest.approx(pair, abs=0.06) for pair in wanted
    ]
    assert len({tuple(pair) for pair in wanted}) > 1


@pytest.mark.parametrize("schedule", ["zero_bubble", "gpipe"])
def test_the_schedule_is_named_and_many_micro_batches_are_cut(
    found: FoundPlan, schedule: str
) -> None:
    problem = load_problem(
        [*TOY, "space.pp=4", "cost.pipeline=simulated", f"cost.schedule={schedule}"]
    )
    plan = Plan(
        16, found.plan.boundaries, tuple(replace(layer, dp=1, tp=2) for layer in found.plan.layers)
    )
    words = ParsedPage(page(found, problem, plan)).words
    assert "one iteration, the first 8 of 16 micro-batches" in words
    assert ("weight gradient" in words) == (schedule == "zero_bubble")


def test_below_a_searched_order_stands_the_closest_rule(found: FoundPlan) -> None:
    code = find("zero_bubble_h1").code(found.plan.pp, found.plan.num_micro_batches)
    words = ParsedPage(page(found, plan=replace(found.plan, schedule=code))).words
    assert words.index("searched, one iteration") < words.index("1f1b, one iteration")


def test_every_run_folder_has_the_page_that_the_ending_names(tmp_path: Path) -> None:
    out = StringIO()
    quick = ["search.method=exact", "output.tensorboard=false"]
    Job(load_problem([*TOY, *quick]), tmp_path, Console(file=out, width=200)).run()
    assert f"explain {tmp_path / 'plan.json'} · report.html lies next to it" in out.getvalue()
    words = ParsedPage((tmp_path / "report.html").read_text()).words
    for said in ("Trainer ", f"darts-parallel tune {tmp_path / 'plan.json'} --top 3"):
        assert said in words
