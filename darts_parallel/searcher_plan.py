"""The plan of the seed report's search (`cost=searcher`), with all its scores in a file."""

import time
from pathlib import Path

from darts_parallel.planfile import write_json
from darts_parallel.problem import Problem
from darts_parallel.searcher import configuration_dicts, products
from darts_parallel.strategy import Plan
from darts_parallel.uniform import first_plan_that_fits


def searcher_plan(problem: Problem, folder: Path) -> Plan:
    """Score every (dp, tp, pp), write all scores, and take the best that runs.

    Args:
        folder: Gets `configurations.json`.

    Errors:
        InfeasibleError: none of them fits.
    """
    began = time.perf_counter()
    data = configuration_dicts(problem, list(products(problem.cluster.num_devices)))
    data["seconds"] = time.perf_counter() - began
    degrees = [(entry["dp"], entry["tp"], entry["pp"]) for entry in data["configurations"]]
    plan = first_plan_that_fits(problem, degrees)
    write_json(folder / "configurations.json", data)
    return plan
