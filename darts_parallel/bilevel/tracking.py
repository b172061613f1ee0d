"""TensorBoard curves of the bilevel search and of the retrained plans."""

from pathlib import Path
from typing import Any

from darts_parallel.bilevel.loop import BilevelRecord
from darts_parallel.bilevel.report import median_time, rows_of
from darts_parallel.bilevel.retraining.retrain import Retrained, smoothed
from darts_parallel.bilevel.settings import BilevelSettings


class BilevelTracker:
    """Writes one TensorBoard run; TensorBoard is imported here because that takes a second.

    Args:
        folder: Of the run.
        settings: Of the search; arms and blocks get a chart each.
    """

    def __init__(self, folder: Path, settings: BilevelSettings) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._settings = settings
        self._writer = SummaryWriter(log_dir=str(folder))
        blocks = {
            f"block {index}: log steps that few bits cost": ["Multiline", [f"log_steps/block_{index}/.*"]]
            for index in range(settings.num_blocks)
        }
        arms = {
            "test loss of all arms": ["Multiline", ["retrain_test/.*"]],
            "training loss of all arms": ["Multiline", ["retrain_train/.*"]],
        }
        self._writer.add_custom_scalars({"blocks": blocks, "arms": arms})

    def record(self, record: BilevelRecord) -> None:
        """Write the curves of one step of the search."""
        values = {"loss/train": record.training_loss}
        if record.validation_loss is not None:
            values["loss/validation"] = record.validation_loss
        if record.noise_sequences is not None:
            values["search/noise_scale_sequences"] = record.noise_sequences
        if record.nats_per_efold is not None:
            values["search/nats_per_efold"] = record.nats_per_efold
        if record.upper is not None:
            upper, known = record.upper, record.log_steps
            values |= {f"outer/{name.replace(' ', '_')}": w for name, w in upper.record.outer_weights.items()}
            values["search/log_steps_of_leading"] = upper.log_steps
            values["search/entropy"] = upper.record.entropy
            values["search/temperature"] = upper.record.schedules.temperature
            if upper.plan is not None:
                values["search/objective_of_best_rounded"] = upper.plan.value
                values["search/seconds_of_best_rounded"] = upper.plan.seconds
            for block in range(self._settings.num_blocks):
                for pairs, prices, word in (
                    (known.forward_pairs, known.forward, "sums_tp{}_b{}"),
                    (known.gradient_pairs, known.gradient, "gradients_dp{}_g{}"),
                ):
                    for pair, price in zip(pairs, prices[block].tolist(), strict=True):
                        values[f"log_steps/block_{block}/{word.format(*pair)}"] = price
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, record.step)

    def retrained(self, arm: str, seed: int, curves: Retrained) -> None:
        """Write the curves of one training from scratch, one tag for each arm and seed."""
        name = arm if self._settings.retrain_seeds == 1 else f"{arm}_{seed}"
        for step, loss in curves.training:
            self._writer.add_scalar(f"retrain_train/{name}", loss, step)
        for step, loss in smoothed(curves.test):
            self._writer.add_scalar(f"retrain_test/{name}", loss, step)

    def finish(self, data: dict[str, Any]) -> None:
        """Write this seed's row in the HPARAMS tab: settings, and the median time to target of every arm."""
        from torch.utils.tensorboard.summary import hparams

        settings = self._settings
        arms = dict.fromkeys(row["arm"] for row in rows_of(data))
        metrics = {f"time_to_target_s/{arm}": median_time([data], arm) for arm in arms}
        values: dict[str, bool | str | float | int] = {
            "estimator": settings.estimator,
            "order": settings.order,
            "level": settings.level,
            "num_steps": settings.num_steps,
            "trial_steps": settings.trial_steps,
            "learning_rate": settings.learning_rate,
            "seed": settings.seed,
        }
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, settings.num_steps)
        file_writer = self._writer.file_writer
        assert file_writer is not None
        for summary in hparams(values, metrics):
            file_writer.add_summary(summary)

    def close(self) -> None:
        """Write what is still held and close the file."""
        self._writer.close()
