"""Training with weights of earlier updates, as pipelines that do not wait do, and what restores accuracy.

Stage k of pp computes with weights that are `pp - 1 - k` updates old, forward and backward alike, since it
stashes them (PipeDream, Narayanan et al. 2019). With two buffers all stages are one update behind
(PipeDream-2BW, Narayanan et al. 2021). `darts_parallel.cost` prices such pipelines. Accuracy comes back by
- weights predicted as many updates ahead as they are old (SpecTrain, Chen et al. 2018, arXiv 1809.02839),
- gradients at a point one step of momentum ahead (Nesterov; Ajanthan et al. 2025, arXiv 2505.01099),
- learning rates that fall with the delay (PipeMare, Yang et al. 2021, arXiv 1910.05124).
"""

from collections import deque
from dataclasses import dataclass, field

from torch import Tensor

STASHED = "PipeDream"
BUFFERED = "PipeDream-2BW"
MOMENTUM = 0.9
"""Share of the last update by which Nesterov's point lies ahead."""
Version = dict[str, Tensor]
"""All weights by name."""


@dataclass
class StaleWeights:
    """Versions of the weights that a training keeps.

    Attributes:
        delays: Updates that the layers of a plan are behind: embedding, blocks, head, and more.
        repair: One of `config.REPAIRS`.
        versions: The last ones, oldest first.
    """

    delays: tuple[int, ...]
    repair: str
    versions: deque[Version] = field(default_factory=deque)

    def delay(self, name: str) -> int:
        """Return the updates that a weight is behind."""
        layer, index, *_ = name.split(".")
        if layer == "blocks":
            return self.delays[int(index) + 1]
        return self.delays[0 if layer == "embedding" else -1]

    def rate_share(self, name: str) -> float:
        """Return the factor of a weight's learning rate."""
        return 1.0 / (1 + self.delay(name)) if self.repair == "rate" else 1.0

    def seen(self, weights: Version) -> Version:
        """Take in the newest version; return the weights that the next batch is computed with."""
        self.versions.append({name: weight.clone() for name, weight in weights.items()})
        if len(self.versions) > max(self.delays) + 2:
            self.versions.popleft()
        return {name: self._old(name) for name in weights}

    def _old(self, name: str) -> Tensor:
        """Return the version that a weight's stage sees, moved ahead by what repairs it."""
        newest = len(self.versions) - 1
        delay = min(self.delay(name), newest)
        old = self.versions[newest - delay][name]
        ahead = {"prediction": delay, "nesterov": min(delay, MOMENTUM)}.get(self.repair, 0)
        if not ahead or delay == newest:
            return old
        return old + ahead * (old - self.versions[newest - delay - 1][name])
