"""What an attack found, one verdict after the other, and the file that lets a stopped attack go on."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

GOOD = ("agreed", "refused", "accepted", "interrupted", "sound")
"""Outcomes that are as they should be; any other says in words what is wrong."""


@dataclass(frozen=True)
class Verdict:
    """What became of one try."""

    subject: str
    """What was tried, so that it can be repeated."""
    outcome: str
    """One of `GOOD`, or what is wrong."""
    plans: int = 0
    """Priced by the oracle, where there is one."""

    @property
    def wrong(self) -> bool:
        """Whether something broke, or a claim was false."""
        return self.outcome not in GOOD


@dataclass(frozen=True)
class Try:
    """One try of an attack."""

    kind: str
    """The attack, a row of the table."""
    name: str
    """Names the try among all, equal in every run with equal options."""
    verdict: Callable[[], Verdict]


class Log:
    """Verdicts by the name of the try; a file of JSON lines keeps them where there is a path.

    Args:
        path: The file; empty: verdicts live as long as this object.
    """

    def __init__(self, path: str) -> None:
        self.path = Path(path) if path else None
        self.verdicts: dict[tuple[str, str], Verdict] = {}
        self.once_wrong: set[tuple[str, str]] = set()
        """Tries that were wrong in any run that the file knows."""
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            for line in self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else ():
                entry = json.loads(line)
                key = (entry.pop("kind"), entry.pop("name"))
                self._keep(key, Verdict(**entry))

    def verdict(self, wanted: Try) -> Verdict:
        """The verdict of a try: the known one where it was good, else a new one."""
        key = (wanted.kind, wanted.name)
        known = self.verdicts.get(key)
        if known is not None and not known.wrong:
            return known
        found = wanted.verdict()
        self._keep(key, found)
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"kind": wanted.kind, "name": wanted.name} | asdict(found)) + "\n")
        return found

    def _keep(self, key: tuple[str, str], verdict: Verdict) -> None:
        self.verdicts[key] = verdict
        if verdict.wrong:
            self.once_wrong.add(key)
