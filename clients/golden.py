"""The golden exports of `tests/golden/export`, by target, with the plans that they were written from."""

from pathlib import Path

from darts_parallel.plan import Plan
from darts_parallel.problem import Problem
from tests.support.export_plans import CASES, GOLDEN, NAMES


def cases(target: str) -> list[str]:
    """Names of the golden plans that a target can express."""
    return [name for name, other in NAMES if other == target]


def read(name: str, file: str) -> str:
    """Text of one golden file."""
    return path(name, file).read_text(encoding="utf-8")


def path(name: str, file: str) -> Path:
    """Path of one golden file."""
    return GOLDEN / name / file


def built(name: str) -> tuple[Problem, Plan]:
    """Problem and plan of a golden export."""
    return CASES[name].build()
