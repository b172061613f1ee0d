"""Ctrl-C ends an experiment, not only the search that it reached."""

from darts_parallel.gradient.result import SearchResult


def unless_interrupted(found: SearchResult) -> SearchResult:
    """The result as it is, unless Ctrl-C cut it short.

    A search answers Ctrl-C with its best plan so far, which is what its user wants; a study of many searches
    would go on with the next one.

    Errors:
        KeyboardInterrupt: the user stopped the search.
    """
    if found.stopped_by == "user":
        raise KeyboardInterrupt
    return found
