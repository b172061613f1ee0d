"""Bad values for every key of the schema, and what the command makes of them."""

import random
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from darts_parallel.config.messages import all_keys
from darts_parallel.config.raw_values import refuse_silent_overrides
from darts_parallel.config.schema import Config
from darts_parallel.errors import DartsParallelError
from darts_parallel.planner import automatic
from darts_parallel.problem.problem import load_problem

BAD = ("-1", "0", "1e300", "-1e300", "1e-300", ".nan", ".inf", "''", "null", "[]", "{}", "[1,-1]", "true",
       "x", "'a\\nb'", "'モデル $(x) [/]'", "999999999999999999999", "0.5", "'${oc.env:HOME}'")  # fmt: skip
"""Values of every wrong kind: range, type, empty, unicode, more than a float holds."""
SECONDS = 20
"""After this long an answer counts as hanging."""
BASE = ("model=toy", "cluster=toy", "training=toy", "space=uniform", "search.exact_seconds=5",
        "cluster.nodes.0.count=1")  # fmt: skip


@dataclass(frozen=True)
class Answer:
    """What became of one override."""

    override: str
    outcome: str
    """`refused` in one sentence, `accepted` with a plan, or what is wrong."""

    @property
    def wrong(self) -> bool:
        """Whether the command broke, hung or warned."""
        return self.outcome not in ("refused", "accepted")


class HangingError(Exception):
    """It takes too long."""


@contextmanager
def _limited(seconds: int) -> Iterator[None]:
    def stop(number: int, frame: Any) -> None:
        raise HangingError

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def keys() -> list[str]:
    """Every dotted key of the schema in the words of an override."""
    found = []
    for key in all_keys(Config):
        place = key.replace("nodes[]", "nodes.0").replace("devices.*", "devices.toy")
        if not place.startswith(("bilevel", "plan", "replan", "output", "model.path", "cost.profile")):
            found.append(place)
    return found


def answered(override: str, search: bool = True) -> Answer:
    """The command's answer to a sound problem with one override more.

    Args:
        override: `key=value`.
        search: Whether an accepted problem is searched, too.
    """
    try:
        with warnings.catch_warnings(), _limited(SECONDS):
            warnings.simplefilter("error")
            refuse_silent_overrides([override])
            problem = load_problem([*BASE, override])
            if search:
                automatic.attempt(problem)
    except DartsParallelError as error:
        sentence = str(error)
        one = "\n" not in sentence and sentence.endswith(".") and "Traceback" not in sentence
        return Answer(override, "refused" if one else f"no sentence: {sentence!r}")
    except HangingError:
        return Answer(override, f"no answer in {SECONDS} s")
    except Exception as error:  # whatever else comes is what the attack looks for
        return Answer(override, f"{type(error).__name__}: {error}")
    return Answer(override, "accepted")


def attack(count: int, seed: int) -> list[Answer]:
    """`count` overrides: every key with one bad value at least, the rest drawn."""
    rng = random.Random(seed)
    pairs = [(key, rng.choice(BAD)) for key in keys()]
    while len(pairs) < count:
        pairs.append((rng.choice(keys()), rng.choice(BAD)))
    return [answered(f"{key}={value}") for key, value in pairs[:count]]
