"""The command's bilevel job: loop, discretized plan with its checks, trainings that judge it, and files."""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from math import inf, isfinite, nan
from operator import itemgetter
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from darts_parallel.bilevel.data import load_corpus
from darts_parallel.bilevel.loop import BilevelLoop, BilevelRecord, TrainingPhase
from darts_parallel.bilevel.optimum import verify
from darts_parallel.bilevel.retrain import FIRST_RETRAIN_SEED, Retrained, Retraining
from darts_parallel.bilevel.settings import BilevelSettings
from darts_parallel.config import LOSSLESS
from darts_parallel.cost import evaluate
from darts_parallel.errors import Amounts, Entries
from darts_parallel.gradient import PlanStage, SearchResult, StepRecord
from darts_parallel.plans import BatchPhase, megatron_schedule, write_json, write_text
from darts_parallel.problem import Problem
from darts_parallel.report import (
    Outcome,
    Tracker,
    filled_table,
    percent,
    plan_dict,
    print_line,
    render,
    report_page,
    shown_path,
)

INTERRUPTED = "darts-parallel: interrupted; plan.json is the best plan so far."
CONTROLS = (
    "controls (frozen weights, no weight step, random logits, trials, greedy by sensitivity): "
    "python -m experiments.bilevel"
)
MANY_PLANS = (
    "no trainer changes its plan with the batch, so each phase is a run of its own; pins of the "
    "degrees and space.micro_batch_size keep one plan, which Megatron-LM can follow"
)
MOST_COLUMNS = 7
"""Steps that the table of probabilities shows, next to the last."""
QUARTERS = 4
"""Lines that a long part prints where there is no terminal to draw a bar on."""
PLAN_FIELDS = ("pp", "num_micro_batches", "stages", "layers", "parallelism", "predicted")
"""Fields of `plan.json` that the plan of a phase has."""
REFERENCE = "all_16_bit"
"""Name of the training whose last loss is the target."""
SCHEDULE = "found"
"""Name of the trainings of the plan that the loop found."""
Phases = Sequence[TrainingPhase]
Schedules = Mapping[str, Phases]
"""Phases of trainings by name."""
Found = Mapping[str, Retrained]
"""Trainings by name."""


def judged(loop: BilevelLoop, schedules: Schedules, index: int = 0) -> dict[str, Retrained]:
    """Train schedules from scratch with equal seeds, until the loss at which the reference ends.

    Args:
        index: Number of the seed, from 0.
    """
    settings = loop.settings
    seed = FIRST_RETRAIN_SEED + settings.seed * settings.retrain_seeds + index
    reference = schedules[REFERENCE]
    seconds = settings.retrain_steps * reference[0].plan.seconds
    interval = settings.evaluate_every * reference[0].plan.seconds
    retraining = Retraining(settings, loop.corpus, seed, interval)
    found = {REFERENCE: retraining.train(reference, seconds)}
    most = seconds * settings.retrain_factor
    # equal schedules are trained once
    train = cache(partial(retraining.train, seconds=most, target=found[REFERENCE].final_loss))
    others = {name: tuple(phases) for name, phases in schedules.items() if name != REFERENCE}
    return found | {name: train(phases) for name, phases in others.items()}


def times(found: Found) -> Amounts:
    """Return predicted seconds to the reference's last loss by name; `inf` where it is not reached."""
    return {name: run.seconds_to(found[REFERENCE].final_loss) for name, run in found.items()}


def compared(loop: BilevelLoop, phases: Phases) -> dict[str, Phases]:
    """Return the found schedule, the reference at 16 bits, and the best plan of each constant batch size."""
    exact = loop.space.free.at_bits(LOSSLESS, LOSSLESS)
    plans = {REFERENCE: loop.best_plan(loop.settings.global_batch_size, exact)}
    for batch in loop.prices.by_batch:
        plans[f"batch {batch}"] = loop.best_plan(batch)
    constant = {name: [TrainingPhase(0, plan)] for name, plan in plans.items() if plan is not None}
    return {SCHEDULE: phases, **constant}


@dataclass
class BilevelJob:
    """One command's bilevel run.

    Attributes:
        problem: With `config.bilevel`; its headroom keeps `space.out_of_memory`.
        folder: For all files.
        console: For the report.
        tracker: For the curves; None writes none.
        update: Shows steps done and a text where there is a terminal.
    """

    problem: Problem
    folder: Path
    console: Console
    tracker: Tracker | None
    update: Callable[[int, str], None]
    quarter: tuple[str, int] = ("", 0)
    records: list[StepRecord] = field(default_factory=list)

    def run(self) -> float:
        """Search, write `plan.json`, judge the plan and report.

        Returns:
            Median predicted seconds to the target loss; seconds of a step where the plan was not judged.
        """
        console = self.console
        self.settings = BilevelSettings.of(self.problem)
        loop = BilevelLoop(self.settings, self.problem, load_corpus())
        finished = self._search(loop)
        phases = loop.phases()
        outcome = self._outcome(loop, phases, finished)
        data = plan_dict(outcome)
        data["training_phases"] = [self._phase(phase) for phase in phases]
        file = self.folder / "plan.json"
        write_json(file, data)
        outcome = replace(outcome, elasticities=data["sensitivity"])
        tables = render(outcome, console)
        tables.append(phase_table(phases))
        console.print(tables[-1])
        lines = self._trainer_lines(phases)
        for line in lines:
            print_line(console, line)
        runs: list[dict[str, Retrained]] = []
        finished = finished and self._judge(loop, phases, runs)
        if runs:
            seconds = summary(runs)
            known = {name: own if isfinite(own) else None for name, own in seconds.items()}
            write_json(file, data | {"time_to_target_s": known})
            tables.append(time_table(runs))
            console.print(tables[-1])
            print_line(console, CONTROLS)
        if not finished:
            print(INTERRUPTED, file=sys.stderr)
        elif self.tracker is not None:
            self.tracker.finish(outcome)
        if self.records:
            tables.append(probability_table(self.records))
        page = report_page(
            outcome, tables, [*lines, f"all curves: tensorboard --logdir {self.folder}"]
        )
        write_text(file.with_name("report.html"), page)
        print_line(console, f"plan: {file} · report.html lies next to it")
        return summary(runs)[SCHEDULE] if runs else outcome.cost.iteration_time_s

    def _search(self, loop: BilevelLoop) -> bool:
        """Run the loop; tell whether it came to its end without Ctrl-C."""
        self._show("trials of few bits", 0, 1)
        try:
            loop.run(self._on_record)
        except KeyboardInterrupt:
            return False
        return True

    def _judge(
        self,
        loop: BilevelLoop,
        phases: Phases,
        runs: list[dict[str, Retrained]],
    ) -> bool:
        """Train what is compared on every seed, add it to `runs`, and tell whether Ctrl-C did not come."""
        count = loop.settings.retrain_seeds
        try:
            schedules = compared(loop, phases)
            if REFERENCE not in schedules:
                print_line(self.console, "no plan at 16 bits fits: nothing to compare with")
                return True
            for index in range(count):
                self._show("trainings from scratch", index, count)
                runs.append(judged(loop, schedules, index))
                for name, run in runs[-1].items():
                    for seconds, loss in run.curve:
                        if self.tracker is not None:  # over predicted milliseconds
                            self.tracker.scalars({f"retrain/{name}": loss}, int(1e3 * seconds))
        except KeyboardInterrupt:
            return False
        return True

    def _outcome(
        self,
        loop: BilevelLoop,
        phases: Phases,
        finished: bool,
    ) -> Outcome:
        """Check the last phase's plan, and describe the search as `plan.json` and the report do."""
        chosen = phases[-1].plan
        here = chosen.problem(self.problem)
        rounded = loop.upper.rounded(loop.prices, chosen.batch)
        raw = rounded or chosen
        stages = (PlanStage("repaired", raw.seconds, fits=True),) if rounded else ()
        answers = []
        checks = self.problem.config.verification
        if checks.enabled and finished:
            answers = verify(loop.space, loop.prices, chosen, checks.max_seconds)
        told: Entries = {"method": "bilevel", "stages": stages}
        told["stopped_by"] = None if finished else "user"
        told["seconds"] = time.perf_counter() - loop.began
        told["steps"] = loop.trainer.step
        told["restarts"] = loop.settings.num_restarts
        told["seed"] = loop.settings.seed
        told["why"] = "least learned time to target, at the batch size of the last phase"
        result = SearchResult(chosen.plan, chosen.seconds, raw.seconds, **told)
        cost = evaluate(chosen.plan, here)
        return Outcome(here, chosen.plan, cost, result, answers)

    def _phase(self, phase: TrainingPhase) -> Entries:
        """Return a phase as `plan.json` has it; its plan has the fields of a plan."""
        here = phase.plan.problem(self.problem)
        plan = phase.plan.plan
        whole = plan_dict(Outcome(here, plan, evaluate(plan, here)))
        return {
            "from_step": phase.from_step,
            "global_batch_size": phase.plan.batch,
            "plan": {name: whole[name] for name in PLAN_FIELDS},
        }

    def _trainer_lines(self, phases: Phases) -> list[str]:
        """Say which trainer can follow the phases."""
        known = [BatchPhase(phase.from_step, phase.plan.batch, phase.plan.plan) for phase in phases]
        schedule = megatron_schedule(known, self.problem.training.seq_len)
        if schedule is not None:
            return [
                f'Megatron-LM from 0.18 on follows these phases (--step-batch-size-schedule "{schedule}"): '
                f"darts-parallel plan={shown_path(self.folder / 'plan.json')} export=megatron"
            ]
        return [MANY_PLANS] if len(phases) > 1 else []

    def _on_record(self, record: BilevelRecord) -> None:
        """Show progress, keep the step of the logits, and write the curves of a step."""
        if record.upper is not None:
            self.records.append(record.upper)
        if self.tracker is not None:
            self._curves(self.tracker, record)
        self._show("loop", record.step, self.settings.num_steps)

    def _curves(self, tracker: Tracker, record: BilevelRecord) -> None:
        """Write both losses, batch and noise scale, and the probabilities of a logit step."""
        values = {
            "loss/train": record.training_loss,
            "loss/validation": record.validation_loss or nan,
            "search/noise_scale_sequences": record.noise_sequences or nan,
            "search/batch": float(record.batch),
        }
        if record.upper is not None:
            tracker.record(replace(record.upper, step=record.step))
            for name, weight in record.upper.outer_weights.items():
                values[f"probability_of/{name}"] = weight
        tracker.scalars(values, record.step)

    def _show(self, text: str, done: int, total: int) -> None:
        """Move the bar, or print a line at every quarter."""
        self.update(done, f"{text}, {done} of {total}")
        quarter = (text, QUARTERS * done // total)
        if self.console.is_terminal or not self.problem.config.output.progress:
            return
        if quarter != self.quarter:
            self.quarter = quarter
            print_line(self.console, f"{text}, {done} of {total}")


def summary(runs: Sequence[Found]) -> Amounts:
    """Return median predicted seconds to the target by name, and those of the best constant batch size."""
    found = [times(run) for run in runs]
    medians = {name: median(own[name] for own in found) for name in found[0]}
    constant = [seconds for name, seconds in medians.items() if name.startswith("batch ")]
    return medians | {"best_constant_batch": min(constant)}


def phase_table(phases: Phases) -> Table:
    """Tabulate the phases: first step, global batch size, plan, and seconds of a step."""
    rows = []
    for phase in phases:
        plan = phase.plan
        seconds = f"{1e3 * plan.seconds:.3f}"
        rows.append([str(phase.from_step), str(plan.batch), plan.describe(), seconds])
    header = ["from step", "batch", "plan", "ms/step"]
    return filled_table("\nPhases of the training", header, rows, left=(2,))


def time_table(runs: Sequence[Found]) -> Table:
    """Tabulate what was trained: seconds to the target, over those of the found plan, and steps."""
    medians = summary(runs)
    rows = []
    for name in runs[0]:
        seconds = medians[name]
        steps = median(run[name].steps for run in runs)
        ratio = seconds / medians[SCHEDULE]
        took = f"{seconds:.3f}" if isfinite(seconds) else "not reached"
        over_found = f"{ratio:.3f}" if 0 < ratio < inf else "-"
        rows.append([name, took, over_found, f"{steps:.0f}"])
    header = ["training", "seconds to target", "over found", "steps trained"]
    return filled_table("\nPredicted time to the target loss", header, rows)


def probability_table(records: Sequence[StepRecord]) -> Table:
    """Tabulate the probabilities of batch sizes and pipelines at about eight steps of the logits."""
    shown = [*records[: -1 : -(-len(records) // MOST_COLUMNS)], records[-1]]
    header = ["", *(f"step {record.step}" for record in shown)]
    # by the first letter: batch sizes, then pipelines
    names = sorted(records[0].outer_weights, key=itemgetter(0))
    rows = [[name, *(percent(own.outer_weights[name], 0) for own in shown)] for name in names]
    return filled_table("\nProbabilities by step of the logits", header, rows)
