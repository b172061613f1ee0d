"""Figures that tests record; `python -m tests.support.recorded` writes them after a change on purpose.

Prices of whole tables, the steps of a descent and the work of the exact search are too many to work out by
hand: tests/golden/figures.json holds, by the overrides of each job, what this code gave.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from darts_parallel.cost import build_tables, evaluate_batch
from darts_parallel.exact import find_layerwise_plan, outer_lower_bounds
from darts_parallel.gradient import search_tables
from darts_parallel.problem import Problem, load_problem
from tests.support.random_plans import random_plans
from tests.support.random_tables import random_table

FILE = Path(__file__).parent.parent / "golden" / "figures.json"
Figures = dict[str, list[float]]
ROUNDED = {
    "gemm_efficiency": 0.5,
    "gemm_half_size": 48.0,
    "attention_efficiency": 0.4,
    "memory_efficiency": 0.8,
    "layer_overhead": 5e-6,
    "overlap_exponent": 3.0,
    "misaligned_efficiency": 0.7,
    "fp8_efficiency": 0.6,
    "streaming_factor": 1.5,
    "tp_hidden_share": 0.2,
    "state_factor": 1.1,
    "grouped_gemm_efficiency": 0.6,
    "all_to_all_efficiency": 0.7,
    "flex_gain": 1.3,
    "permutation_factor": 1.4,
    "expert_overhead": 4e-6,
    "divided_half_size": 16.0,
    "kernel_gap": 3e-6,
    "collective_start": 7e-6,
}
"""Figures of all devices, so that a calibration changes no price here."""
PRICED = (
    "forward",
    "backward",
    "weight_gradient",
    "sync",
    "per_iteration",
    "static",
    "activation",
    "for_weights",
    "working",
    "reshard",
    "p2p",
    "capacity",
    "in_flight",
)


def rounded(job: str) -> Problem:
    """Load the problem of some overrides, of the toy where they name no other, on round devices."""
    problem = load_problem(["model=toy", "cluster=toy", "training=toy", *job.split()])
    # of other memory where devices differ
    return problem.with_devices(
        lambda device: replace(device, **ROUNDED, activation_factor=1.1 + len(device.name) / 100)
    )


def weighed(values: torch.Tensor) -> float:
    """Add up figures with weights of 1 to 2, so that an exchange of two of them shows."""
    own = values.detach().double().flatten()
    return float((own * (1.0 + torch.arange(len(own)) % 11 / 11)).sum())


def prices(job: str) -> Figures:
    """Price all strategies of a job, and eight plans of each of its tables."""
    found: Figures = {}
    for number, table in enumerate(build_tables(rounded(job))):
        own = [getattr(table, name) for name in PRICED] + [
            table.terms[name] for name in sorted(table.terms)
        ]
        found[f"{number}"] = [weighed(values) for values in own]
        cost = evaluate_batch(table, random_plans(table, 8, torch.Generator().manual_seed(number)))
        found[f"{number} plans"] = [weighed(values) for values in vars(cost).values()]
    return found


def descent(job: str) -> Figures:
    """Descend on a job, or on two random tables in tight memory: losses, entropies and plans on the way."""
    problem = rounded(job)
    settings, kind = problem.config.search, problem.config.space.kind
    seed, tables = settings.seed, build_tables(problem)
    if "cluster" not in job:
        tables = [
            random_table(seed, pp=pp, num_layers=7, num_choices=5, tightness=0.5) for pp in (2, 3)
        ]
    result = search_tables(tables, kind, settings, seed)
    steps = [(r.loss, r.surrogate_time_s, r.entropy, r.best_time_s) for r in result.history]
    fitted = next(own.iteration_time_s for own in result.stages if own.name == "fitted")
    others = [seconds for seconds, _ in result.alternatives]
    return {
        "steps": [figure for step in steps for figure in step],
        "weights": [
            weight for record in result.history for weight in record.outer_weights.values()
        ],
        "ends": [result.iteration_time_s, fitted, *others],
        "plan": [c.dp + 10.0 * c.tp + 100.0 * c.zero_stage for c in result.plan.layers],
        "plans": [float(result.plans_evaluated)],
    }


def proofs(kind: str) -> Figures:
    """Solve random tables exactly: bounds as shares of the optimum, and labels that were made."""
    tables = [
        random_table(
            seed,
            pp=1 + seed % 3,
            num_layers=8,
            num_choices=4,
            num_layouts=1 + seed % 2,
            equal_layers=seed % 4 < 2,
            tightness=0.4 + 0.05 * seed,
        )
        for seed in range(12)
    ]
    found = [find_layerwise_plan([table], kind) for table in tables]
    bounds = [float(outer_lower_bounds(table, kind).min()) for table in tables]
    return {
        "shares": [
            min(bound, 1e9) / min(own.cost, 1e9) for bound, own in zip(bounds, found, strict=True)
        ],
        "labels": [float(own.plans_evaluated) for own in found],
    }


MAKERS: dict[str, Callable[[str], Figures]] = {
    "prices": prices,
    "descent": descent,
    "proofs": proofs,
}


def recorded() -> dict[str, dict[str, Figures]]:
    """Return what stands in the file, by maker and job."""
    found: dict[str, dict[str, Figures]] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


if __name__ == "__main__":
    every = {kind: {job: MAKERS[kind](job) for job in jobs} for kind, jobs in recorded().items()}
    text = json.dumps(every, indent=1).replace("\n    ", " ").replace("\n   ]", " ]")
    FILE.write_text(text + "\n", encoding="utf-8")
