"""Does the bilevel search find plans that reach a target loss sooner?

Command: `python -m experiments.bilevel [key=value ...]`, e.g. `network=fast seeds=0,1`. Keys are the
fields of `ExperimentSettings` and `BilevelSettings`. Writes `FOLDER/NETWORK/bilevel.csv` (every run)
and `report.md` (medians, spread, paired differences), TensorBoard curves, and a JSON file for each
seed; seeds that are there already are not run again, and a search that was killed resumes. A seed's
search takes about 0.2 s a step and a retraining about 0.1 s a step on an idle core at the default sizes.
"""

import hashlib
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch

from darts_parallel.bilevel.arms import fastest_plan, fastest_with_bits, random_plan_of_equal_time
from darts_parallel.bilevel.candidates import Candidate
from darts_parallel.bilevel.data import Corpus, load_corpus, unigram_entropy
from darts_parallel.bilevel.loop import BilevelPlan, BilevelSearch, resume
from darts_parallel.bilevel.retrain import Retrained, retrain
from darts_parallel.bilevel.settings import BilevelSettings, Overrides
from darts_parallel.bilevel.time_model import TimeModel
from darts_parallel.bilevel.tracking import BilevelTracker
from darts_parallel.errors import ConfigError, DartsParallelError
from darts_parallel.planfile import write_json
from experiments.bilevel_report import ARMS, write_report

RETRAIN_KEYS = (
    "num_blocks", "width", "num_heads", "context", "num_devices", "retrain_steps", "learning_rate",
    "learning_rate_warmup", "validation_sequences", "evaluate_every",
)  # fmt: skip
"""What a retrained plan depends on besides itself and the seed."""


@dataclass
class ExperimentSettings(BilevelSettings):
    """The search's settings and what is run with them."""

    context: int = 64
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    arms: tuple[str, ...] = ARMS
    folder: str = "outputs/bilevel"

    def __post_init__(self) -> None:
        super().__post_init__()
        for arm in self.arms:
            if arm not in ARMS:
                raise ConfigError(f"arms={arm} must be among {', '.join(ARMS)}; nearest legal: {ARMS[0]}.")

    def search(self, seed: int) -> BilevelSettings:
        """Settings of one seed's search."""
        shared = {f.name: getattr(self, f.name) for f in fields(BilevelSettings)}
        return BilevelSettings(**(shared | {"seed": seed}))


def main(arguments: list[str]) -> None:
    """Run the seeds and report."""
    torch.set_num_threads(1)
    try:
        settings = ExperimentSettings(**Overrides.parse(arguments, ExperimentSettings).values)
        corpus = load_corpus()
    except DartsParallelError as error:
        print(f"experiments.bilevel: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    folder = Path(settings.folder) / settings.network
    folder.mkdir(parents=True, exist_ok=True)
    print(f"unigram entropy {unigram_entropy(corpus.train):.3f} nats, {len(corpus.train):,} training bytes")
    for seed in settings.seeds:
        path = folder / f"seed-{seed}.json"
        if not path.exists():
            write_json(path, run_seed(settings, corpus, seed, folder))
        elif not _same_settings(path, settings.search(seed)):
            print(f"experiments.bilevel: folder={settings.folder} holds seed {seed} of other settings; "
                  "choose another folder.", file=sys.stderr)  # fmt: skip
            raise SystemExit(2)
        print(write_report(folder), flush=True)


def _same_settings(path: Path, settings: BilevelSettings) -> bool:
    """Whether a finished seed was run with these settings."""
    known = json.loads(path.read_text(encoding="utf-8"))["settings"]
    return bool(known == json.loads(json.dumps(asdict(settings))))


def run_seed(settings: ExperimentSettings, corpus: Corpus, seed: int, folder: Path) -> dict[str, Any]:
    """Search, then retrain every arm from scratch with the same seed."""
    search = BilevelSearch(settings.search(seed), corpus)
    tracker = BilevelTracker(folder / "tensorboard" / f"seed-{seed}", search.choices)
    resume(search, folder / "checkpoints" / f"seed-{seed}", lambda text: print(text, file=sys.stderr))
    found = search.run(tracker.record, folder / "checkpoints" / f"seed-{seed}")
    last = search.candidate_weights()
    runs: dict[str, Any] = {}
    for arm in settings.arms:
        plan = arm_plan(arm, search, found, seed)
        index = search.settings.batches.index(plan.global_batch_size)
        curves = retrain_once(
            plan, search.settings, corpus, seed, Path(settings.folder) / "retrained",
            partial(tracker.retrained, arm),
        )  # fmt: skip
        exchange = curves.exchange
        runs[arm] = {
            "plan": [candidate.label() for candidate in plan.blocks],
            "global_batch_size": plan.global_batch_size,
            "seconds_per_step": float(search.upper.times[index].plan_seconds([plan.blocks])[0]),
            "validation_loss": curves.final_loss,
            "nats_per_efold": exchange.nats_per_efold if exchange else None,
            "validation": curves.validation,
        }
        print(seed, arm, runs[arm]["plan"], f"{curves.final_loss:.4f}", flush=True)
    tracker.close()
    return {
        "seed": seed,
        "settings": asdict(search.settings),
        "runs": runs,
        "noise_sequences": search.trainer.noise.sequences,
        "largest_weight": last.amax(1).tolist(),
    }


def arm_plan(arm: str, search: BilevelSearch, found: BilevelPlan, seed: int) -> BilevelPlan:
    """The plan of one arm; all but the found one at the nominal global batch size."""
    blocks, nominal = search.settings.num_blocks, search.settings.global_batch_size
    batches = search.settings.batches
    time: TimeModel = search.upper.times[batches.index(nominal) if nominal in batches else 0]
    same = search.upper.times[batches.index(found.global_batch_size)]
    generator = torch.Generator().manual_seed(seed + 4)
    makers: dict[str, Callable[[], tuple[Candidate, ...]]] = {
        "bilevel": lambda: found.blocks,
        "all_16_bit": lambda: fastest_with_bits(time, blocks, 16),
        "all_4_bit": lambda: fastest_with_bits(time, blocks, 4),
        "time_only": lambda: fastest_plan(time, blocks, time.choices.candidates),
        "random_equal_time": lambda: random_plan_of_equal_time(same, found.blocks, generator),
    }
    batch = found.global_batch_size if arm in ("bilevel", "random_equal_time") else nominal
    return BilevelPlan(makers[arm](), batch)


def retrain_once(
    plan: BilevelPlan,
    settings: BilevelSettings,
    corpus: Corpus,
    seed: int,
    folder: Path,
    on_loss: Callable[[str, int, float], None],
) -> Retrained:
    """Retrain, or take the curves of the same training from an earlier arm or network."""
    key = {name: getattr(settings, name) for name in RETRAIN_KEYS}
    key |= {"seed": seed, "plan": [c.label() for c in plan.blocks], "batch": plan.global_batch_size}
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    path = folder / f"{digest}.json"
    if not path.exists():
        curves = retrain(plan, settings, corpus, seed)
        folder.mkdir(parents=True, exist_ok=True)
        write_json(path, key | {"training": curves.training, "validation": curves.validation})
    data = json.loads(path.read_text(encoding="utf-8"))
    curves = Retrained(
        *(tuple((step, loss) for step, loss in data[name]) for name in ("training", "validation"))
    )
    for name, curve in (("train", curves.training), ("validation", curves.validation)):
        for step, loss in curve:
            on_loss(name, step, loss)
    return curves


if __name__ == "__main__":
    main(sys.argv[1:])
