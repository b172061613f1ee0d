"""TensorBoard curves of the bilevel search and of the retrained plans."""

from pathlib import Path

from darts_parallel.bilevel.candidates import CandidateSet
from darts_parallel.bilevel.loop import BilevelRecord


class BilevelTracker:
    """Writes one TensorBoard run; TensorBoard is imported here because that takes a second.

    Args:
        folder: Of the run.
        choices: Candidates, for the names of curves.
    """

    def __init__(self, folder: Path, choices: CandidateSet) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._choices = choices
        self._writer = SummaryWriter(log_dir=str(folder))

    def record(self, record: BilevelRecord) -> None:
        """Write the curves of one step of the search."""
        step = record.step
        values = {"loss/train": record.training_loss, "search/entropy": record.entropy}
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

    def retrained(self, arm: str, name: str, step: int, loss: float) -> None:
        """Write one point of a retrained plan's `train` or `validation` curve."""
        self._writer.add_scalar(f"retrain_{name}/{arm}", loss, step)

    def close(self) -> None:
        """Write what is still held and close the file."""
        self._writer.close()
