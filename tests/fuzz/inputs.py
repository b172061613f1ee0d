"""Give bad values to every key of the schema, and judge what the command answers."""

import random
import warnings
from collections.abc import Iterator
from functools import partial

from darts_parallel.config._keys import all_keys
from darts_parallel.config.composition import refuse_silent_overrides
from darts_parallel.config.schema import Config
from darts_parallel.errors import DartsParallelError
from darts_parallel.planner import plan
from darts_parallel.problem.problem import load_problem
from tests.fuzz.case import FuzzCase, FuzzOutcome

BAD = (
    "-1",
    "0",
    "1e300",
    "-1e300",
    "1e-300",
    ".nan",
    ".inf",
    "''",
    "null",
    "[]",
    "{}",
    "[1,-1]",
    "true",
    "x",
    "'a\\nb'",
    "'モデル $(x) [/]'",
    "999999999999999999999",
    "0.5",
    "'${oc.env:HOME}'",
)
"""Values of every wrong kind: range, type, empty, unicode, more than a float holds."""
BASE = (
    "model=toy",
    "cluster=toy",
    "training=toy",
    "space=uniform",
    "search.exact_seconds=5",
    "cluster.nodes.0.count=1",
)
READ_ONLY = ("bilevel", "plan", "output", "model.path", "cost.profile")
"""Keys whose values are read and not searched with: they name files, or how a training is run."""


def keys() -> list[str]:
    """Return every dotted key of the schema in the words of an override."""
    return [
        key.replace("nodes[]", "nodes.0").replace("devices.*", "devices.toy")
        for key in all_keys(Config)
    ]


def answer(override: str, search: bool = True) -> FuzzOutcome:
    """Answer a valid problem with one more override.

    Args:
        override: `key=value`.
        search: Whether an accepted problem is searched, too.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            refuse_silent_overrides([override])
            base = ("experiment=bilevel",) if override.startswith("bilevel.") else BASE
            problem = load_problem([*base, override])
            if search and not override.startswith(READ_ONLY):
                plan(problem)
    except DartsParallelError as error:
        sentence = str(error)
        one = "\n" not in sentence and sentence.endswith(".") and "Traceback" not in sentence
        return FuzzOutcome(override, "refused" if one else f"no sentence: {sentence!r}")
    except Exception as error:  # any other error is what this test looks for
        return FuzzOutcome(override, f"{type(error).__name__}: {error}")
    return FuzzOutcome(override, "accepted")


def cases(count: int, seed: int) -> Iterator[FuzzCase]:
    """Yield every key with one bad value in random order, and again until there are `count`."""
    rng = random.Random(seed)
    every = keys()
    for start in range(0, count, len(every)):
        for key in rng.sample(every, min(count - start, len(every))):
            yield "bad values of keys", partial(answer, f"{key}={rng.choice(BAD)}")
