"""Ask one exact method about a problem."""

import time

from darts_parallel.exact import Verification
from darts_parallel.planner._session import Asked, Session
from darts_parallel.planner.methods import METHODS
from darts_parallel.problem import Problem


def check(
    problem: Problem, name: str = "dynamic_programming", seconds: float = float("inf")
) -> Verification:
    """Return the answer of a method that has so many seconds."""
    session = Session(Asked.of(problem), METHODS)
    METHODS[name].run(session, time.monotonic() + seconds)
    return session.found.answers[name]
