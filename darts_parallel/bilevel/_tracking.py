"""TensorBoard curves of the bilevel search and of the retrained plans."""

from pathlib import Path

from darts_parallel.bilevel.loop import BilevelRecord
from darts_parallel.bilevel.retrain import Retrained, smoothed
from darts_parallel.bilevel.settings import BilevelSettings


class BilevelTracker:
    """Writes one TensorBoard run; TensorBoard is imported here because that takes a second.

    Args:
        folder: Folder of the run.
        settings: Settings of the search.
    """

    def __init__(self, folder: Path, settings: BilevelSettings) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._settings = settings
        self._writer = SummaryWriter(log_dir=str(folder))

    def record(self, record: BilevelRecord) -> None:
        """Write the curves of one step of the search."""
        values = {
            "loss/train": record.training_loss,
            "loss/validation": record.validation_loss,
            "search/noise_scale_sequences": record.noise_sequences,
            "search/nats_per_efold": record.nats_per_efold,
        }
        if record.upper is not None:
            upper, prices = record.upper, record.log_slowdown
            values |= {f"outer/{name.replace(' ', '_')}": w for name, w in upper.record.outer_weights.items()}
            values["search/log_slowdown_of_leading"] = upper.log_slowdown
            values["search/entropy"] = upper.record.entropy
            values["search/temperature"] = upper.record.schedules.temperature
            if upper.plan is not None:
                values["search/objective_of_best_rounded"] = upper.plan.value
                values["search/seconds_of_best_rounded"] = upper.plan.seconds
            for pairs, by_block, word in (
                (prices.forward_pairs, prices.forward, "sums_tp{}_b{}"),
                (prices.gradient_pairs, prices.gradient, "gradients_dp{}_g{}"),
            ):
                for block, row in enumerate(by_block.tolist()):
                    for pair, price in zip(pairs, row, strict=True):
                        values[f"log_slowdown/block_{block}/{word.format(*pair)}"] = price
        for tag, value in values.items():
            if value is not None:
                self._writer.add_scalar(tag, value, record.step)

    def retrained(self, variant: str, seed: int, curves: Retrained, seconds: float) -> None:
        """Write the curves of one training from scratch, one tag for each variant and seed.

        Args:
            variant: Name of the plan.
            seed: Seed of the training.
            curves: Losses.
            seconds: Predicted seconds to the target loss.
        """
        name = variant if self._settings.retrain_seeds == 1 else f"{variant}_{seed}"
        for step, loss in curves.training:
            self._writer.add_scalar(f"retrain_train/{name}", loss, step)
        for step, loss in smoothed(curves.test):
            self._writer.add_scalar(f"retrain_test/{name}", loss, step)
        self._writer.add_scalar(f"time_to_target_s/{name}", seconds, self._settings.num_steps)

    def close(self) -> None:
        """Write what is still in memory and close the file."""
        self._writer.close()
