"""The variants of the ablation: what each changes, and one run of it."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from baselines import annealing, flexflow, random_search
from darts_parallel.bilevel import BilevelSettings, Jobs, Protocol, load_corpus, rows_of
from darts_parallel.config import SearchConfig
from darts_parallel.cost import CostTable
from darts_parallel.gradient import GradientSearch, search_tables
from darts_parallel.problem import load_problem
from experiments.comparison.controls import CONTROLS
from experiments.comparison.problems import suite

PROBLEMS = {
    "gpt2_tight": "gpt2_xl on a10_4x4, tight",
    "v100_tight": "gpt2_xl on v100_4x8, tight",
    "mixed": "gpt2_xl on a10_a100_mixed, loose",
    "bert_tight": "bert_345m on a10_4x4, tight",
    "bert_uneven": "bert_345m on a10_8x4, uneven",
    "t5_loose": "t5_1_3b on a10_4x4, loose",
    "toy_tight": "toy on toy, tight",
}
"""Short names (they stand in Hydra sweeps) of problems of `problems.py`."""
ALONE = ("gpt2_tight", "bert_uneven", "toy_tight")
"""Problems of a sweep that names none: tight memory, and layers that all differ."""
BASE: dict[str, Any] = {"num_steps": 150, "num_restarts": 16, "polish_starts": 4, "polish_finalists": 1}
"""Settings of every gradient variant: a quarter of the search's own restart-steps, so that ten seeds end."""
FEW: dict[str, Any] = {"num_steps": 10, "num_restarts": 2, "polish_starts": 1}
"""Settings of a first try."""
DEFAULT = "default"
BILEVEL = "bilevel"
"""The problem of the variants that are a bilevel search."""


@dataclass(frozen=True)
class Variant:
    """Change fields of `SearchConfig`, or the loop that descends."""

    question: str
    changes: dict[str, Any] = field(default_factory=dict)
    loop: type[GradientSearch] = GradientSearch


GRADIENT_VARIANTS = {
    DEFAULT: Variant("the search, at 150 steps"),
    "temperature_high": Variant("temperature schedule", {"temperature": [2.0, 0.5]}),
    "temperature_low": Variant("temperature schedule", {"temperature": [0.2, 0.05]}),
    "restarts_4": Variant("restarts (16)", {"num_restarts": 4}),
    "restarts_64": Variant("restarts (16)", {"num_restarts": 64}),
    "gumbel": Variant("softmax or Gumbel samples", {"relaxation": "gumbel"}),
    "fixed_penalty": Variant("augmented Lagrangian or penalty", {"multiplier_step": 0.0}),
    "random_logits": Variant("informed or random start", {"initial_preference": 0.0, "initial_noise": 1.0}),
    # as many restart-steps as the default, which drops half of the restarts
    "plain_restarts": Variant("many starts (thinned)", {"num_restarts": 8, "thin_at": []}),
    "repair_only": Variant("rounded plans fitted to the memory", {"fitting": "repair"}),
    "fill_only": Variant("rounded plans fitted to the memory", {"fitting": "fill"}),
    "prices_only": Variant("rounded plans fitted to the memory", {"fitting": "prices"}),
    "late_thinning": Variant("restarts halved four times, early", {"thin_at": [0.25, 0.5]}),
    "moves_only": Variant("polishing by exact segment programs", {"polish_labels": 0}),
    "no_gradient": Variant("gradients or noise of their size", loop=CONTROLS["no_gradient"]),
    "soft_edges": Variant("edges rounded in the second half", {"hard_stages_from": 1.0}),
}
NO_DESCENT = "no_descent"
RIVALS = {NO_DESCENT: None, "random_search": random_search, "annealing": annealing, "flexflow": flexflow}
"""Variants without a descent, which have `budget` seconds and are read at those of the default."""
BILEVEL_VARIANTS = {"bilevel_first_order": "first", "bilevel_second_order": "second"}
BILEVEL_SIZES = [
    "experiment=bilevel", "model.num_layers=2", "model.hidden_size=32", "training.seq_len=32",
    "bilevel.num_steps=60", "bilevel.warmup_steps=20", "bilevel.retrain_steps=120",
    "bilevel.validation_sequences=32", "bilevel.trial_steps=10", "bilevel.variants=[bilevel,all_16_bit]",
]  # fmt: skip
"""A bilevel search of seconds: it compares the orders, not the plans with the world."""


def run_variant(
    problem: str, variant: str, seed: int, budget: float, quick: bool, folder: Path
) -> dict[str, Any]:
    """Run once: a row without gaps, which need the optimum, and its anytime curve.

    Args:
        problem: One of `PROBLEMS`, or `BILEVEL` for a bilevel variant.
        variant: Its name.
        seed: Of all random numbers.
        budget: Seconds of a rival.
        quick: Few steps: shows that it works, and nothing else.
        folder: For what a bilevel search leaves.
    """
    torch.set_num_threads(1)
    row: dict[str, Any] = {"problem": problem, "variant": variant, "seed": seed}
    if variant in BILEVEL_VARIANTS:
        return row | _bilevel(BILEVEL_VARIANTS[variant], seed, quick, folder)
    tables = tables_of(problem)
    began = time.process_time()
    seconds, rival = 0.2 if quick else budget, RIVALS.get(variant)
    config = SearchConfig(max_seconds=seconds if variant == NO_DESCENT else 600.0)
    if rival is not None:
        answer = rival.solve(tables, "layerwise", deadline=time.monotonic() + seconds, seed=seed)
        found = {"raw_s": answer.cost, "polished_s": answer.cost, "seconds": seconds,
                 "evaluations": answer.plans_evaluated, "curve": answer.curve}  # fmt: skip
    else:
        own = GRADIENT_VARIANTS.get(variant, Variant("", loop=CONTROLS[NO_DESCENT]))
        changes = BASE | own.changes | (FEW if quick else {})
        found = _gradient(tables, replace(config, **changes), seed, own.loop)
    return row | found | {"cpu_seconds": time.process_time() - began}


def tables_of(problem: str) -> tuple[CostTable, ...]:
    """Return cost tables of a problem by its short name."""
    return suite([PROBLEMS[problem]])[0].tables()


def _gradient(
    tables: Sequence[CostTable], config: SearchConfig, seed: int, loop: type[GradientSearch]
) -> dict[str, Any]:
    result = search_tables(tables, "layerwise", config, seed, loop=loop)
    if result is None:
        return {"raw_s": float("inf"), "polished_s": float("inf"), "seconds": 0.0, "evaluations": 0,
                "curve": ()}  # fmt: skip
    return {"raw_s": result.raw_iteration_time_s, "polished_s": result.iteration_time_s,
            "seconds": result.seconds, "evaluations": result.plans_evaluated,
            "curve": result.curve}  # fmt: skip


def _bilevel(order: str, seed: int, quick: bool, folder: Path) -> dict[str, Any]:
    """Return predicted seconds to the target loss of the plan that the bilevel search finds, retrained."""
    few = ["bilevel.num_steps=4", "bilevel.warmup_steps=2", "bilevel.retrain_steps=20"] if quick else []
    problem = load_problem([*BILEVEL_SIZES, *few, "bilevel.estimator=mixture", f"bilevel.order={order}"])
    settings = BilevelSettings.of(problem, seed)
    began, cpu = time.monotonic(), time.process_time()
    protocol = Protocol(problem, load_corpus(), folder, Jobs(), tensorboard=False)
    found = rows_of(protocol.run_seed(settings))
    mine, reference = (next(row for row in found if row["variant"] == name) for name in settings.variants)
    return {"time_to_target_ratio": mine["time_to_target_s"] / reference["time_to_target_s"],
            "seconds": time.monotonic() - began, "cpu_seconds": time.process_time() - cpu}  # fmt: skip
