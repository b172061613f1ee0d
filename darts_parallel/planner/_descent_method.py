"""The method `gradient`: descend, round and polish; the default of every problem."""

from darts_parallel.gradient import StepRecord, explain_infeasible, proven_infeasible, search_tables
from darts_parallel.planner._session import Method, Session


def descend(session: Session, deadline: float) -> None:
    """Search by gradient for `search.max_seconds`, and polish.

    Errors:
        InfeasibleError: it is proven that no plan of the space fits; names the binding constraint.
    """
    settings, done = session.settings, session.elapsed
    with session.watcher.progress("search", settings.num_steps) as update:

        def on_record(record: StepRecord) -> None:
            update(record.step, f"best {record.best_time_s:.4f} s/iteration")
            session.watcher.record(record)

        given = (session.tables, session.space_kind, settings, settings.seed)
        found = search_tables(*given, on_record=on_record)
    if (
        found is None
        and session.problem is not None
        and proven_infeasible(session.tables, session.space_kind)
    ):
        raise explain_infeasible(session.problem, session.tables)
    if found is not None:
        session.result = found
        session.improve((done + at, seconds) for at, seconds in found.curve)
        session.interrupted = found.stopped_by == "user"


GRADIENT = Method("gradient", descend)
