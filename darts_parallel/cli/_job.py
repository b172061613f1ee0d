"""One job of the command: plan or evaluate, report, write."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby, pairwise
from math import inf
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from darts_parallel.cli._lengths import run_lengths
from darts_parallel.cli._price import distance_to_best, require_agreement
from darts_parallel.cli._trainers import (
    Offer,
    offers,
    start_command,
    trainers_table,
)
from darts_parallel.cli._tune import run_tuning
from darts_parallel.config import ANY, BETWEEN, BOX, INSIDE, ClusterConfig, given_values
from darts_parallel.cost import CostBreakdown, evaluate
from darts_parallel.errors import DartsParallelError, Entries, UnsupportedError, fail, one_line
from darts_parallel.export import export_lines, export_plan, taken_by, write_export
from darts_parallel.gradient import StepRecord
from darts_parallel.planner import (
    CHOSEN,
    Planned,
    Rental,
    Rung,
    Update,
    Watcher,
    ladder,
    sensitivity,
    tightened,
)
from darts_parallel.planner import plan as find_plan
from darts_parallel.plans import Plan, read_phases, write_json, write_text
from darts_parallel.problem import Problem, bill, choose
from darts_parallel.report import (
    Outcome,
    Tracker,
    memory_table,
    plan_dict,
    print_line,
    render,
    render_ending,
    render_ladder,
    report_page,
    shown_path,
)

QUIET = 0.7
"""CPU seconds a second from which on a machine is not busy."""


def busy_words(cpu_seconds: float, seconds: float) -> str:
    """Say that other programs took the machine during a search; empty where they did not."""
    if cpu_seconds >= QUIET * seconds:
        return ""
    took = f"the search got {cpu_seconds:.1f} CPU s in {seconds:.1f} s"
    return f"the machine was busy: {took}, and its limits are wall-clock seconds"


@dataclass(frozen=True)
class Findings:
    """Everything found for one job, before it is written."""

    planned: Planned
    outcome: Outcome
    offers: Sequence[Offer]
    rungs: Sequence[Rung]
    """Plans by their risk of running out of memory."""


@dataclass
class Job(Watcher):
    """Plans a problem, reports and writes; watches its own search for progress and curves.

    Attributes:
        problem: What to plan.
        folder: Gets `plan.json` and every other file that is asked for.
        console: For the report.
        rental: How the nodes of the problem were chosen out of an offer, and their best uniform
            plan.
        overrides: What the command changed, `key=value`.
    """

    problem: Problem
    folder: Path
    console: Console
    rental: Rental | None = None
    overrides: Sequence[str] = ()
    tracker: Tracker | None = field(init=False, default=None)

    def run(self) -> float:
        """Do what the configuration asks for; return seconds per iteration, infinite if it does not fit."""
        config = self.problem.config
        hook = threading.excepthook
        # TensorBoard writes in a thread, whose errors come to this one, too
        threading.excepthook = lambda given: None if given.exc_type is OSError else hook(given)
        if config.output.tensorboard:
            self.tracker = Tracker(self.folder / "tensorboard", self.problem, self.overrides)
        try:
            if config.bilevel is not None and config.plan is None:
                return self._bilevel()
            if config.tune.get("from") is not None:
                return run_tuning(self.problem, self.folder, self.console)
            if config.training.lengths is not None and config.plan is None:
                return run_lengths(self.problem, self.folder, self.console)
            return self._plan()
        finally:
            with self._curves():
                if self.tracker is not None:
                    self.tracker.close()
            threading.excepthook = hook

    def _bilevel(self) -> float:
        """Search while a toy Transformer trains; its package is imported where it is used alone."""
        from darts_parallel.bilevel import BilevelJob

        with self.progress("bilevel") as update:
            problem = tightened(self.problem)
            return BilevelJob(problem, self.folder, self.console, self.tracker, update).run()

    @contextmanager
    def _curves(self) -> Iterator[None]:
        """Give up curves that cannot be written: they cost no plan."""
        try:
            yield
        except OSError as error:
            self.tracker = None
            self.say(f"the curves cannot be written ({error.strerror}); all else stands.")

    def _plan(self) -> float:
        """Search (or evaluate a given plan), verify, write, report, export."""
        began = time.monotonic()
        worked = time.process_time()
        planned = find_plan(self.problem, rental=self.rental, watcher=self)
        plan = planned.plan
        busy = busy_words(time.process_time() - worked, time.monotonic() - began)
        problem = planned.problem or self.problem
        if problem.config.plan is not None:
            require_agreement(plan, problem.config, self.overrides)
        cost = evaluate(plan, problem)
        self._refuse(plan, cost)
        elasticities = {}
        with self._beside("the sensitivity"), suppress(KeyboardInterrupt):
            elasticities = sensitivity(plan, problem)
        assumed = tuple(self._assumed(problem, plan))
        outcome = Outcome(
            problem,
            plan,
            cost,
            planned.result,
            planned.answers,
            elasticities,
            planned.warning,
            assumed,
        )
        found = list(offers(problem, planned))
        findings = Findings(planned, outcome, found, self._rungs(planned))
        best: Entries = {}
        distance: list[str] = []
        if self.problem.config.price:
            with self._beside("the best plan of the space"):
                best, distance = distance_to_best(outcome, self.folder)
        try:
            self._write(findings, best)
        except DartsParallelError:
            # the search took its time: what it found is shown at least
            render(outcome, self.console, partial(taken_by, problem))
            raise
        # written before the report: the reader of a pipe may leave in the middle of it
        exported, refusal = self._export(plan, problem.config.export)
        with self._plan_stands(), self._beside("the report"):
            self._report(findings, distance)
        with self._beside("the explanation"):
            render_ending(planned, problem, self.folder, self.console)
        if busy and planned.result is not None and planned.result.stopped_by == "time_limit":
            self.say(busy)
        if self.tracker is not None:
            with self._plan_stands(), self._curves():
                self.tracker.finish(outcome)
        for line in exported or self._start_lines(outcome):
            self.say(line)
        if refusal:
            fail(refusal)
        return cost.iteration_time_s if cost.feasible else inf

    def _assumed(self, problem: Problem, plan: Plan) -> Iterator[str]:
        """Say which batch, length and links the command assumed."""
        training = problem.training
        given = given_values(self.overrides)
        sizes = {"gbs=": "training.global_batch_size", "seq=": "training.seq_len"}
        missing = [word for word, key in sizes.items() if key not in given]
        if ANY in self.overrides and missing:
            batch = f"{training.global_batch_size:,} × {training.seq_len:,} tokens"
            yield f"assumed: {batch}; set {' and '.join(missing)}"
        space = problem.config.space
        if problem.config.price and problem.config.plan is None and space.pins:
            pins = ", ".join(space.pins)
            word = "fastest" if self._seconds(plan) < inf else "lightest"
            yield f"assumed: the {word} {space.kind} plan with {pins}, whatever its risk"
            names = problem.model.layer_names
            chunks = (names[first:end] for first, end in pairwise(plan.boundaries))
            counts = groupby(sum("." in name for name in chunk) for chunk in chunks)
            runs = [(count, len(list(run))) for count, run in counts]
            if len(runs) > 1:
                blocks = ", ".join(f"{n} × {count}" if n > 1 else str(count) for count, n in runs)
                yield f"assumed: {blocks} blocks in the stages; for others edit stages in plan.json"
        if BOX in self.overrides:
            yield from self._assumed_links(problem.config.cluster)
        if unmeasured := problem.unmeasured:
            yield f"assumed: formulas for {', '.join(unmeasured)}, which cost.profile lacks"

    def _assumed_links(self, cluster: ClusterConfig) -> Iterator[str]:
        """Say which links of `cluster=box` were assumed, and not named by the user."""
        node = cluster.nodes[0]
        links = []
        if node.gpus > 1:
            links.append((INSIDE, "inside a node", node.intra_node))
        if node.count > 1:
            links.append((BETWEEN, "between nodes", cluster.inter_node))
        for place, words, link in links:
            key = f"{place}.bandwidth_GBps="
            if sum(override.startswith(key) for override in self.overrides) < 2:
                yield f"assumed: {link.bandwidth_GBps:g} GB/s {words}; set {key}"

    @contextmanager
    def _beside(self, what: str) -> Iterator[None]:
        """Say what of the things next to the plan is missing, and why: it costs no plan."""
        try:
            yield
        except DartsParallelError as error:
            self.say(f"{what} is missing: {one_line(str(error))}")

    def _start_lines(self, outcome: Outcome) -> list[str]:
        """Say how the plan starts, or that no trainer takes it; nothing where it does not fit."""
        if not outcome.cost.feasible:
            return []
        file = self.folder / "plan.json"
        return [f"start it: {start_command(outcome.problem, outcome.plan, file)}"]

    def _report(self, findings: Findings, distance: Sequence[str]) -> None:
        """Print the report, and write it as a page."""
        outcome = findings.outcome
        problem = outcome.problem
        tables = render(outcome, self.console, partial(taken_by, problem))
        if problem.config.price:
            self.console.print(memory_table(outcome))
        for line in distance:
            self.say(line)
        tables += render_ladder(findings.rungs, self.console)
        trainers = trainers_table(findings.offers, problem, outcome.plan)
        self.console.print(trainers)
        file = shown_path(self.folder / "plan.json")
        lines = [
            *self._start_lines(outcome),
            f"why this plan: darts-parallel explain {file}",
            f"three plans to measure: darts-parallel tune {file} --top 3",
        ]
        page = report_page(outcome, [*tables, trainers], lines)
        write_text(self.folder / "report.html", page)

    @contextmanager
    def _plan_stands(self) -> Iterator[None]:
        """Ctrl-C ends what is inside, not the command: the plan is written."""
        try:
            yield
        except KeyboardInterrupt:
            self.say("interrupted: plan.json is complete; the report or the curves are not.")

    def _refuse(self, plan: Plan, cost: CostBreakdown) -> None:
        """Refuse a plan over budget or a failing export, before anything is written."""
        problem = self.problem
        config = problem.config
        amount = bill(config.objective, problem.cluster, cost.iteration_time_s)
        if amount is not None:
            choose(config.objective, [amount], [plan.describe(problem.training.global_batch_size)])
        if config.plan is not None and config.export is not None:
            export_plan(problem, plan, config.export, self._seconds)

    def _seconds(self, plan: Plan) -> float:
        """Price a plan; infinite where it does not fit."""
        cost = evaluate(plan, self.problem)
        return cost.iteration_time_s if cost.feasible else inf

    def _rungs(self, planned: Planned) -> list[Rung]:
        """Return the plans of all risk levels, and write the files of all but the chosen one."""
        found: Sequence[Rung] = ()
        with self._beside("the risk table"):
            found = ladder(planned)
        written = []
        for rung in found:
            with self._beside(rung.file):
                if rung.name != CHOSEN:
                    own = Outcome(self.problem, rung.plan, evaluate(rung.plan, self.problem))
                    write_json(self.folder / rung.file, plan_dict(own))
                written.append(rung)
        return written

    def _write(self, findings: Findings, best: Entries) -> None:
        """Write `plan.json` and what belongs next to it."""
        planned = findings.planned
        outcome = findings.outcome
        result = planned.result
        if result is not None and planned.interrupted:
            outcome = replace(outcome, result=replace(result, stopped_by="user"))
        data = plan_dict(outcome)
        for name, content in planned.files.items():
            with self._beside(name):
                write_json(self.folder / name, content)
        data["trainers"] = {offer.name: offer.to_dict() for offer in findings.offers}
        data["ladder"] = [
            {"plan": rung.file, "seconds": rung.seconds, "chance": rung.chance}
            for rung in findings.rungs
        ]
        write_json(self.folder / "plan.json", data | planned.entries() | best)

    def _export(self, plan: Plan, target: str | None) -> tuple[list[str], str]:
        """Write the plan for a trainer; return the lines about its files, and why there are none."""
        if target is None:
            return [], ""
        try:
            path = self.problem.config.plan
            phases = read_phases(path) if path else ()
            exported = export_plan(self.problem, plan, target, self._seconds, phases)
        except UnsupportedError as error:
            return [], str(error)
        return export_lines(target, exported, write_export(exported, self.folder)), ""

    @contextmanager
    def progress(self, title: str, total: int | None = None) -> Iterator[Update]:
        """Show a progress bar, where somebody looks."""
        show = self.problem.config.output.progress and self.console.is_terminal
        words = TextColumn("{task.description}")
        columns = (SpinnerColumn(), TextColumn(title), BarColumn(), words, TimeElapsedColumn())
        with Progress(*columns, console=self.console, disable=not show, transient=True) as progress:
            task = progress.add_task("", total=total)
            yield lambda done, text: progress.update(task, completed=done, description=text)

    def record(self, record: StepRecord) -> None:
        """Write the curves of a step."""
        if self.tracker is not None:
            with self._curves():
                self.tracker.record(record)

    def say(self, sentence: str) -> None:
        """Print a sentence in one line."""
        print_line(self.console, sentence)
