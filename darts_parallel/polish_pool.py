"""Which plans of a search are polished, how thoroughly, and in which order."""

import time

from darts_parallel.candidates import Candidate, CandidatePool, Entry
from darts_parallel.config import SearchConfig
from darts_parallel.polish import polish


def polish_pool(pool: CandidatePool, kind: str, config: SearchConfig, began: float, *, hurry: bool) -> None:
    """Polish the best plans quickly, then the best of those thoroughly; the best one first in a hurry."""

    def late() -> bool:
        return time.perf_counter() - began > config.max_seconds

    def improve(entry: Entry, *, thorough: bool) -> None:
        dear = {"thorough": thorough, "chains": config.polish_chains}
        plan, _, evaluated = polish(pool.tables[entry.table], entry.plan, kind, **dear, stop=late)
        pool.evaluated += evaluated
        pool.add(Candidate(entry.table, plan))

    try:
        for entry in pool.top(1 if hurry else 0):
            improve(entry, thorough=True)
        for entry in pool.top(config.polish_starts):
            improve(entry, thorough=False)
        for entry in pool.top(config.polish_finalists):
            improve(entry, thorough=True)
    except KeyboardInterrupt:
        return
