"""The method `gradient`: descend, round and polish; the default of every problem."""

from darts_parallel.gradient import NoPlanFitsError, StepRecord, proven_infeasible, search_tables
from darts_parallel.planner._session import Method, Session


def descend(session: Session, deadline: float) -> None:
    """Search by gradient for `search.max_seconds`, and polish.

    Errors:
        InfeasibleError: it is proven that no plan of the space fits; names the binding constraint.
    """
    asked = session.asked
    reported = session.reported
    settings = asked.settings
    with reported.watcher.progress("search", settings.num_steps) as update:

        def on_record(record: StepRecord) -> None:
            update(record.step, f"best {record.best_time_s:.4f} s/iteration")
            reported.watcher.record(record)

        result = search_tables(
            asked.tables, asked.space_kind, settings, settings.seed, on_record=on_record
        )
    if result is not None:
        session.found.result = result
        reported.interrupted = result.stopped_by == "user"
    elif asked.job is not None and proven_infeasible(asked.tables, asked.space_kind):
        raise NoPlanFitsError(asked.job, asked.tables)


GRADIENT = Method("gradient", descend)
