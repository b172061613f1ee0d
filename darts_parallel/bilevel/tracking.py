"""TensorBoard curves of the bilevel search and of the retrained plans."""

from collections.abc import Sequence
from pathlib import Path

from darts_parallel.bilevel.candidates import CandidateSet
from darts_parallel.bilevel.loop import BilevelRecord

PICTURE_EVERY = 40
"""Steps between heatmaps of the candidates' weights."""


class BilevelTracker:
    """Writes one TensorBoard run; TensorBoard is imported here because that takes a second.

    Args:
        folder: Of the run.
        choices: Candidates, for the names of curves.
        batches: Global batch sizes to choose from.
    """

    def __init__(self, folder: Path, choices: CandidateSet, batches: Sequence[int]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._choices, self._batches = choices, batches
        self._writer = SummaryWriter(log_dir=str(folder))

    def record(self, record: BilevelRecord) -> None:
        """Write the curves of one step of the search."""
        step = record.step
        values = {
            "loss/train": record.training_loss,
            "search/entropy": record.entropy,
            "search/temperature": record.temperature,
            "search/hard_seconds_per_step": record.hard_seconds,
        }
        for batch, weight in zip(self._batches, record.batch_weights.tolist(), strict=True):
            values[f"outer/global_batch_{batch}"] = weight
        labels = [candidate.label() for candidate in self._choices.candidates]
        for label, weight in zip(labels, record.weights.mean(0).tolist(), strict=True):
            values[f"strategy/{label.replace(' ', '_')}"] = weight
        values |= self._trials(record)
        if record.noise_sequences is not None:
            values["search/noise_scale_sequences"] = record.noise_sequences
        if record.nats_per_efold is not None:
            values["search/nats_per_efold"] = record.nats_per_efold
        if record.upper is not None:
            values["loss/validation"] = record.upper.validation_loss
            values["search/seconds_per_step"] = record.upper.seconds
            parts = zip(record.upper.loss_part, record.upper.time_part, strict=True)
            for block, (loss_part, time_part) in enumerate(parts):
                for candidate, loss, time in zip(self._choices.candidates, loss_part, time_part, strict=True):
                    name = candidate.label().replace(" ", "_")
                    values[f"gradient_loss/block_{block}/{name}"] = float(loss)
                    values[f"gradient_time/block_{block}/{name}"] = float(time)
        for block, row in enumerate(record.weights.tolist()):
            for candidate, weight in zip(self._choices.candidates, row, strict=True):
                values[f"weight/block_{block}/{candidate.label().replace(' ', '_')}"] = weight
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, step)
        if step % PICTURE_EVERY == 0:
            self._picture(record, labels)

    def _trials(self, record: BilevelRecord) -> dict[str, float]:
        """What trials say that bits cost, in log steps."""
        measured = {
            "dp{}_g{}": (self._choices.gradient_pairs, record.trial_costs),
            "tp{}_b{}": (self._choices.forward_pairs, record.sum_costs),
        }
        return {
            "trial_log_steps/" + name.format(*pair): cost
            for name, (pairs, costs) in measured.items()
            if costs is not None
            for pair, cost in zip(pairs, costs.tolist(), strict=True)
        }

    def _picture(self, record: BilevelRecord, labels: list[str]) -> None:

        from darts_parallel.report.plots import probability_map, to_image

        blocks = [f"block {index}" for index in range(len(record.weights))]
        figure = probability_map(record.weights, labels, blocks, f"Step {record.step}, candidates by block")
        self._writer.add_image("search/probabilities", to_image(figure), record.step, dataformats="HWC")

    def retrained(self, arm: str, name: str, step: int, loss: float) -> None:
        """Write one point of a retrained plan's `train` or `validation` curve."""
        self._writer.add_scalar(f"retrain_{name}/{arm}", loss, step)

    def close(self) -> None:
        """Write what is still held and close the file."""
        self._writer.close()
