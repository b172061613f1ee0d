"""The thinning schedule, worked out by hand; facts of the search that random mutants broke unseen."""

from collections.abc import Callable

import pytest
import torch

from darts_parallel.config.search import SearchConfig
from darts_parallel.gradient import descent
from darts_parallel.gradient.descent import GradientSearch
from tests.support.random_tables import random_table


class Watched(GradientSearch):
    """Note the restarts of every step, and rankings and margins of each thinning."""

    sizes: list[int]
    rankings: list[tuple[list[float], list[float]]]
    margins: list[float]

    def move(self) -> None:
        self.sizes.append(self.groups[0].logits.shape[1])
        super().move()

    def _keep(self, counts: list[int], margin: float = torch.inf) -> None:
        before = self.merits[0][0].tolist()
        super()._keep(counts, margin)
        self.margins.append(margin)
        self.rankings.append((before, self.merits[0][0].tolist()))


Search = Callable[[SearchConfig], Watched]


@pytest.fixture
def search(monkeypatch: pytest.MonkeyPatch) -> Search:
    """A search of one pipeline configuration that no bound excludes."""

    def no_bounds(table: object, known: float, late: object) -> torch.Tensor:
        return torch.zeros(1).double()

    monkeypatch.setattr(descent, "outer_lower_bounds", no_bounds)

    def watched(config: SearchConfig) -> Watched:
        tables = [random_table(3, num_outer=1, tightness=2.0)]
        result = Watched(tables, "layerwise", config, 0)
        result.sizes = []
        result.rankings = []
        result.margins = []
        return result

    return watched


@pytest.mark.parametrize(
    ("steps", "restarts", "expected"),
    [
        # after 0.05, 0.15, 0.3 and 0.5 of 20 steps half of the restarts leave; from 0.85 on
        # boundaries are whole, in 8 ways
        (20, 32, [32] + 2 * [16] + 3 * [8] + 4 * [4] + 7 * [2] + 3 * [8]),
        # an odd number is halved downwards, and one restart always stays
        (20, 5, [5] + 2 * [2] + 14 * [1] + 3 * [8]),
        # shares are rounded down, the first one not to 0; those that fall on one step thin once
        (4, 8, [8, 4, 2, 8]),
    ],
)
def test_restarts_are_halved_after_the_shares_of_the_steps(
    search: Search, steps: int, restarts: int, expected: list[int]
) -> None:
    run = search(SearchConfig(num_steps=steps, num_restarts=restarts, polish=False))
    run.run()
    assert run.sizes == expected


def test_the_better_half_stays_in_its_order(search: Search) -> None:
    run = search(SearchConfig(num_steps=20, num_restarts=16, polish=False))
    run.run()
    assert len(run.rankings) == 4
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
    search: Search, monkeypatch: pytest.MonkeyPatch, relaxed: float, hard: float, gap: float
) -> None:
    run = search(SearchConfig(num_steps=2, num_restarts=2))
    hard_gap = torch.tensor([hard]).double()
    monkeypatch.setattr(run.pool, "gap_to_best", lambda table, outers: hard_gap)
    merit = torch.tensor([[relaxed + 1.5, relaxed + 1.0]]).double()
    assert float(run._gap_to_best(run.groups[0], merit, 1.0)) == pytest.approx(gap)


def test_the_margin_of_thinning_shrinks_with_the_steps(search: Search) -> None:
    run = search(SearchConfig(num_steps=20, num_restarts=4, polish=False))
    run.run()
    # a hundredth at the last of 20 steps, 20 / n times as much after n
    assert run.margins == pytest.approx([0.2, 0.2 / 3, 0.2 / 6, 0.02])
    assert [len(after) for _, after in run.rankings] == [2, 1, 1, 1]
