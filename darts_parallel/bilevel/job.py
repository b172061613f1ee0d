"""The command's bilevel job: every seed's search, the retraining of its plan, and what is left of them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from darts_parallel import report
from darts_parallel.bilevel.data import load_corpus
from darts_parallel.bilevel.protocol import Protocol
from darts_parallel.cost import evaluate
from darts_parallel.planfile import write_json
from darts_parallel.problem import Problem
from darts_parallel.strategy import Plan
from darts_parallel.tracking import Tracker


def run_bilevel(
    problem: Problem,
    folder: Path,
    console: Console,
    tracker: Tracker | None,
    update: Callable[[int, str], None],
) -> float:
    """Run all seeds; `plan.json` is the first seed's plan, written as soon as there is one.

    Args:
        problem: With `config.bilevel`.
        folder: For all files.
        console: For the report.
        tracker: For the pictures of the plan; None writes none.
        update: Shows steps done and a text.

    Returns:
        Predicted seconds per iteration of the first seed's plan.
    """
    plans: list[Plan] = []

    def on_seed(seed: int, data: dict[str, Any]) -> None:
        if not plans:
            write_json(folder / "plan.json", data["plan"])
        plans.append(Plan.from_dict(data["plan"]))
        console.print(f"seed {seed}: {', '.join(data['runs']['bilevel']['plan'])}", highlight=False)

    def on_progress(text: str, done: int, total: int) -> None:
        update(done, f"{text}, step {done} of {total}")

    text = Protocol(problem, load_corpus(), folder, problem.config.output.tensorboard, on_progress).run(
        on_seed
    )
    cost = evaluate(plans[0], problem)
    report.render(problem, None, plans[0], cost, [], console)
    if tracker is not None:
        tracker.finish(None, plans[0], cost, [])
    console.print(text, highlight=False)
    for name, path in (("plan", "plan.json"), ("runs", "bilevel.csv"), ("report", "report.md")):
        console.print(f"{name}: {folder / path}", soft_wrap=True, highlight=False)
    return cost.iteration_time_s
