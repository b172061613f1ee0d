"""Which plans of a search are polished, how thoroughly, and in which order."""

from darts_parallel.candidates import Candidate, CandidatePool, Entry
from darts_parallel.config import SearchConfig
from darts_parallel.polish import polish


def polish_pool(pool: CandidatePool, kind: str, config: SearchConfig, *, hurry: bool) -> str | None:
    """Polish the best plans quickly, then the best of those thoroughly; the best one first in a hurry.

    Returns:
        What cut it short, `user` or `time_limit`; None where nothing did.
    """
    late = False

    def stop() -> bool:
        nonlocal late
        late = late or pool.clock.seconds > config.max_seconds
        return late

    def improve(entry: Entry, *, thorough: bool) -> None:
        dear = {"thorough": thorough, "chains": config.polish_chains}
        plan, _, evaluated = polish(pool.tables[entry.table], entry.plan, kind, **dear, stop=stop)
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
        return "user"
    return "time_limit" if late else None
