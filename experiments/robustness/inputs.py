"""Bad values for every key of the schema, and what the command makes of them."""

import random
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from darts_parallel.config.keys import all_keys
from darts_parallel.config.raw_values import refuse_silent_overrides
from darts_parallel.config.schema import Config
from darts_parallel.errors import DartsParallelError
from darts_parallel.planner import plan
from darts_parallel.problem.problem import load_problem
from experiments.robustness.verdict import Try, Verdict

BAD = ("-1", "0", "1e300", "-1e300", "1e-300", ".nan", ".inf", "''", "null", "[]", "{}", "[1,-1]", "true",
       "x", "'a\\nb'", "'モデル $(x) [/]'", "999999999999999999999", "0.5", "'${oc.env:HOME}'")  # fmt: skip
"""Values of every wrong kind: range, type, empty, unicode, more than a float holds."""
SECONDS = 20
"""CPU seconds after which an answer counts as hanging, however busy the machine is."""
BASE = ("model=toy", "cluster=toy", "training=toy", "space=uniform", "search.exact_seconds=5",
        "cluster.nodes.0.count=1")  # fmt: skip


class HangingError(Exception):
    """It takes too long."""


@contextmanager
def _limited(seconds: int) -> Iterator[None]:
    def stop(number: int, frame: Any) -> None:
        raise HangingError

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


READ_ONLY = ("bilevel", "plan", "replan", "output", "model.path", "cost.profile")
"""Keys whose values are read and not searched with: they name files, or how a training is run."""


def keys() -> list[str]:
    """Every dotted key of the schema in the words of an override."""
    places = {"nodes[]": "nodes.0", "devices.*": "devices.toy"}
    found = []
    for key in all_keys(Config):
        for general, special in places.items():
            key = key.replace(general, special)
        found.append(key)
    return found


def answered(override: str, search: bool = True) -> Verdict:
    """The command's answer to a sound problem with one override more.

    Args:
        override: `key=value`.
        search: Whether an accepted problem is searched, too.
    """
    try:
        with warnings.catch_warnings(), _limited(SECONDS):
            warnings.simplefilter("error")
            refuse_silent_overrides([override])
            base = ("experiment=bilevel",) if override.startswith("bilevel.") else BASE
            problem = load_problem([*base, override])
            if search and not override.startswith(READ_ONLY):
                plan(problem)
    except DartsParallelError as error:
        sentence = str(error)
        one = "\n" not in sentence and sentence.endswith(".") and "Traceback" not in sentence
        return Verdict(override, "refused" if one else f"no sentence: {sentence!r}")
    except HangingError:
        return Verdict(override, f"no answer in {SECONDS} CPU s")
    except Exception as error:  # whatever else comes is what the attack looks for
        return Verdict(override, f"{type(error).__name__}: {error}")
    return Verdict(override, "accepted")


def tries(count: int, seed: int) -> Iterator[Try]:
    """Every key with one bad value, then keys drawn until there are `count`."""
    rng = random.Random(seed)
    pairs = [(key, rng.choice(BAD)) for key in keys()]
    while len(pairs) < count:
        pairs.append((rng.choice(keys()), rng.choice(BAD)))
    for number, (key, value) in enumerate(pairs):
        yield Try("bad values of keys", f"{seed}/{number}", partial(answered, f"{key}={value}"))
