"""Prices, descents and proofs are what they were: see `tests/support/recorded.py`."""

import pytest

from tests.support.recorded import MAKERS, Figures, recorded


@pytest.mark.parametrize(
    ("kind", "job", "known"),
    [(kind, job, own) for kind, jobs in recorded().items() for job, own in jobs.items()],
)
def test_figures_are_those_on_file(kind: str, job: str, known: Figures) -> None:
    found = MAKERS[kind](job)
    if kind == "proofs":  # bounds may become better, and labels fewer
        assert all(
            new >= old * (1 - 1e-9)
            for new, old in zip(found["shares"], known["shares"], strict=True)
        )
        assert all(new <= old for new, old in zip(found["labels"], known["labels"], strict=True))
        return
    assert found.keys() == known.keys()
    for key, values in known.items():
        # a descent carries the rounding of its exponentials on
        assert found[key] == pytest.approx(values, rel=1e-10 if kind == "prices" else 1e-6), key
