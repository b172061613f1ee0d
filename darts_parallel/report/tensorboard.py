"""TensorBoard: live curves of the search, then pictures and figures of the plan it found.

TensorBoard and matplotlib are imported where they are first needed: together they cost about a second.
"""

from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

from darts_parallel.cost.evaluation import CostBreakdown
from darts_parallel.gradient.result import SearchResult
from darts_parallel.gradient.step_record import StepRecord
from darts_parallel.plan.strategy import Plan
from darts_parallel.planner.verification import Verification
from darts_parallel.problem.problem import Problem
from darts_parallel.report import text as report

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_STAGES = 32
MAX_LAYER_SCALARS = 64
"""Up to this many layers x strategies each probability is a curve; above, they are pictures."""
PICTURE_EVERY = 5


class Tracker:
    """Writes one TensorBoard run.

    Args:
        folder: Of the run; made if it is not there.
        problem: What is searched for.
    """

    def __init__(self, folder: Path, problem: Problem) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.problem = problem
        self._names = tuple(layer.name for layer in problem.model.layers)
        self._writer = SummaryWriter(log_dir=str(folder))
        self._records = 0
        self._pictured = -1
        self._step = 0
        self._writer.add_custom_scalars(
            {
                "search": {
                    "outer choices": ["Multiline", ["outer/.*"]],
                    "strategies, mean over layers": ["Multiline", ["strategy/.*"]],
                    "memory over capacity": ["Multiline", ["memory/.*"]],
                    "seconds per iteration": ["Multiline", ["search/(surrogate|best)_time_s"]],
                }
            }
        )

    def record(self, record: StepRecord) -> None:
        """Write the curves of one step of the search."""
        self._step = record.step
        self._scalars("search", {
            "temperature": record.schedules.temperature,
            "boundary_temperature": record.schedules.boundary_temperature,
            "sharpness": record.schedules.sharpness,
            "loss": record.loss,
            "surrogate_time_s": record.surrogate_time_s,
            "best_time_s": record.best_time_s,
            "entropy": record.entropy,
            "pp": record.pp,
        })  # fmt: skip
        self._scalars("outer", record.outer_weights)
        self._scalars("cost_terms", record.terms)
        ratios = (record.memory / record.capacity).tolist()
        for name, values in (("memory", ratios), ("multiplier", record.multipliers.tolist())):
            self._scalars(name, {f"stage_{k:02d}": value for k, value in enumerate(values[:MAX_STAGES])})
        means = record.probabilities.mean(0).tolist()
        self._scalars("strategy", dict(zip(record.choices, means, strict=True)))
        self._probabilities(record)
        self._records += 1

    def finish(
        self,
        result: SearchResult | None,
        plan: Plan,
        cost: CostBreakdown,
        verifications: list[Verification],
        elasticities: dict[str, float] | None = None,
    ) -> None:
        """Write the pictures, the text and the figures of the final plan.

        Args:
            result: None where the plan was given and not searched.
            plan: The final plan.
            cost: Of that plan.
            verifications: Answers of the baselines; may be empty.
            elasticities: What `sensitivity` says of the plan; may be missing.
        """
        from darts_parallel.report import plots

        self._text(result, plan, cost, verifications)
        self._picture("plan/schedule", plots.gantt_figure(plan, cost, self.problem))
        self._picture("plan/memory", plots.memory_figure(cost))
        self._picture("plan/strategies", plots.strategies_figure(plan, self._names))
        if result is not None and result.history:
            self._picture("search/convergence", plots.convergence_figure(result.history))
            if self._pictured != result.history[-1].step:
                last = plots.probability_figure(result.history[-1], self._names)
                self._picture("search/probabilities", last)
        final = {f"breakdown_s/{name}": seconds for name, seconds in cost.breakdown_s.items()}
        final |= {"tokens_per_s": cost.tokens_per_s, "mfu": cost.mfu}
        self._scalars("final", final | _metrics(result, cost, verifications))
        self._scalars("sensitivity", elasticities or {})
        self._hyperparameters(result, cost, verifications)
        self._writer.flush()

    def close(self) -> None:
        """Write what is still held and close the file."""
        self._writer.close()

    def _scalars(self, group: str, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(f"{group}/{_tag(name)}", value, self._step)

    def _probabilities(self, record: StepRecord) -> None:
        """Every probability as a curve in small problems, as a heatmap now and then in large ones."""
        if record.probabilities.numel() <= MAX_LAYER_SCALARS:
            for name, row in zip(self._names, record.probabilities.tolist(), strict=True):
                self._scalars(f"layer/{_tag(name)}", dict(zip(record.choices, row, strict=True)))
        elif self._records % PICTURE_EVERY == 0:
            from darts_parallel.report import plots

            self._picture("search/probabilities", plots.probability_figure(record, self._names))
            self._pictured = record.step

    def _picture(self, tag: str, figure: "Figure") -> None:
        from darts_parallel.report import plots

        self._writer.add_image(tag, plots.to_image(figure), self._step, dataformats="HWC")

    def _text(
        self,
        result: SearchResult | None,
        plan: Plan,
        cost: CostBreakdown,
        verifications: list[Verification],
    ) -> None:
        line = plan.describe(self.problem.training.global_batch_size)
        text = report.render_text(self.problem, result, plan, cost, verifications)
        self._writer.add_text("plan", f"**{line}**\n\n```\n{text}```", self._step)

    def _hyperparameters(
        self, result: SearchResult | None, cost: CostBreakdown, verifications: list[Verification]
    ) -> None:
        """The row of this run in the HPARAMS tab, inside the run itself.

        `SummaryWriter.add_hparams` would open a run of its own in a subfolder for it.
        """
        from torch.utils.tensorboard.summary import hparams

        values = _metrics(result, cost, verifications)
        metrics = {f"final/{_tag(name)}": value for name, value in values.items()}
        file_writer = self._writer.file_writer
        assert file_writer is not None
        for summary in hparams(_hyperparameter_values(self.problem, result), metrics):
            file_writer.add_summary(summary)


def _tag(name: str) -> str:
    """A name without the characters that TensorBoard's tags may not hold."""
    return "".join(c if c.isalnum() or c in "-/._" else "_" for c in name)


def _metrics(
    result: SearchResult | None, cost: CostBreakdown, verifications: list[Verification]
) -> dict[str, float]:
    metrics = {"iteration_time_s": cost.iteration_time_s}
    if result is not None:
        metrics |= {"raw_iteration_time_s": result.raw_iteration_time_s, "search_seconds": result.seconds}
    metrics |= {f"gap_{entry.name}": entry.gap for entry in verifications}
    return {name: value for name, value in metrics.items() if isfinite(value)}


def _hyperparameter_values(
    problem: Problem, result: SearchResult | None
) -> dict[str, bool | str | float | int]:
    config, settings = problem.config, problem.config.search
    return {
        "model": config.model.name,
        "cluster": config.cluster.name,
        "global_batch_size": config.training.global_batch_size,
        "space": config.space.kind,
        "seed": settings.seed if result is None else result.seed,
        "num_steps": settings.num_steps,
        "restarts": settings.num_restarts,
        "relaxation": settings.relaxation,
        "learning_rate": settings.learning_rate,
        "temperature": " to ".join(f"{value:g}" for value in settings.temperature),
        "boundary_temperature": " to ".join(f"{value:g}" for value in settings.boundary_temperature),
        "sharpness": " to ".join(f"{value:g}" for value in settings.sharpness),
        "polish": str(settings.polish),
    }
