"""The thinning schedule, worked out by hand; small facts that random mutants of the search broke unseen."""

from collections.abc import Callable

import pytest
import torch

from darts_parallel.config.search import SearchConfig
from darts_parallel.gradient import descent
from darts_parallel.gradient.descent import GradientSearch
from tests.support.random_tables import random_table


class Watched(GradientSearch):
    """Note the number of restarts that every step is taken with, and the rankings of each thinning."""

    sizes: list[int]
    rankings: list[tuple[list[float], list[float]]]

    def move(self) -> None:
        self.sizes.append(self.groups[0].logits.shape[1])
        super().move()

    def _thin(self, merits: list[torch.Tensor]) -> None:
        before = merits[0][0].tolist()
        super()._thin(merits)
        self.rankings.append((before, self.merits[0][0].tolist()))


@pytest.fixture
def search(monkeypatch: pytest.MonkeyPatch) -> Callable[[SearchConfig], Watched]:
    """A search of one outer choice that no bound excludes."""
    monkeypatch.setattr(
        descent, "outer_lower_bounds", lambda table, known, late: torch.zeros(1).double()
    )

    def watched(config: SearchConfig) -> Watched:
        result = Watched([random_table(3, num_outer=1, tightness=2.0)], "layerwise", config, 0)
        result.sizes, result.rankings = [], []
        return result

    return watched


@pytest.mark.parametrize(
    ("steps", "thin_at", "restarts", "expected"),
    [
        # after steps 0.05, 0.15, 0.3 and 0.5 of 20: after 1, 3, 6 and 10 steps half of the restarts leave
        (20, [0.05, 0.15, 0.3, 0.5], 32, [32] + 2 * [16] + 3 * [8] + 4 * [4] + 10 * [2]),
        # an odd number is halved downwards, and one restart always stays
        (8, [0.25, 0.5, 0.75], 5, 2 * [5] + 2 * [2] + 4 * [1]),
        # shares that fall on one step thin once; shares of steps are rounded down, 0.99 of 4 to 3
        (4, [0.5, 0.5, 0.6, 0.99], 8, 2 * [8] + 1 * [4] + 1 * [2]),
        (4, [], 8, 4 * [8]),
        (4, [1.0], 8, 4 * [8]),
    ],
)
def test_restarts_are_halved_after_the_shares_of_the_steps(
    search: Callable[[SearchConfig], Watched],
    steps: int,
    thin_at: list[float],
    restarts: int,
    expected: list[int],
) -> None:
    run = search(
        SearchConfig(num_steps=steps, num_restarts=restarts, thin_at=thin_at, polish=False)
    )
    run.run()
    assert run.sizes == expected


def test_the_better_half_stays_in_its_order(search: Callable[[SearchConfig], Watched]) -> None:
    run = search(SearchConfig(num_steps=8, num_restarts=8, thin_at=[0.25, 0.5], polish=False))
    run.run()
    assert len(run.rankings) == 2
    for before, after in run.rankings:
        worst = sorted(before)[len(before) // 2 :]
        assert after == [merit for merit in before if merit not in worst]


@pytest.mark.parametrize(
    ("relaxed", "hard", "gap"),
    [
        # the smaller of both, but a third of the hard gap where that is more;
        # without a hard plan the relaxed one
        (0.02, 0.05, 0.02),
        (0.05, 0.02, 0.02),
        (0.01, 0.9, 0.3),
        (0.04, float("inf"), 0.04),
        (0.0, 0.0, 0.0),
    ],
)
def test_the_gap_to_the_best_counts_relaxed_and_hard_plans_by_hand(
    search: Callable[[SearchConfig], Watched],
    monkeypatch: pytest.MonkeyPatch,
    relaxed: float,
    hard: float,
    gap: float,
) -> None:
    run = search(SearchConfig(num_steps=2, num_restarts=2))
    monkeypatch.setattr(
        run.pool, "gap_to_best", lambda table, outers: torch.tensor([hard]).double()
    )
    merit = torch.tensor([[relaxed + 1.5, relaxed + 1.0]]).double()
    assert float(run._gap_to_best(run.groups[0], merit, 1.0)) == pytest.approx(gap)


def test_the_margin_of_thinning_shrinks_with_the_steps(
    search: Callable[[SearchConfig], Watched], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, margins = (
        search(SearchConfig(num_steps=8, num_restarts=4, thin_at=[0.25, 0.5], polish=False)),
        [],
    )
    keep = run._keep

    def noted(merits: list[torch.Tensor], counts: list[int], margin: float = torch.inf) -> None:
        margins.append((counts, margin))
        keep(merits, counts, margin)

    monkeypatch.setattr(run, "_keep", noted)
    run.run()
    # a hundredth at the last of 8 steps, 8 / 2 and 8 / 4 times as much after 2 and 4
    assert margins == [([2], pytest.approx(0.04)), ([1], pytest.approx(0.02))]
