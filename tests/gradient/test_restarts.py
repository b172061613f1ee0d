import torch

from darts_parallel.config.search import SearchConfig
from darts_parallel.gradient.adam import Adam
from darts_parallel.gradient.restarts import RestartBatch, rank_starts, resample_sources
from tests.support.random_tables import random_table


def test_starts_are_ranked_by_loss_and_gradient_together() -> None:
    losses, norms = torch.tensor([2.0, 1.0, 1.5, 2.5]), torch.tensor([1.0, 4.0, 3.0, 2.0])
    assert rank_starts(losses, norms).tolist() == [1, 2, 0, 3]
    # equal sums of ranks: the lower loss goes first
    assert rank_starts(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0])).tolist() == [0, 1]


def test_every_place_goes_on_from_a_survivor() -> None:
    order = torch.tensor([[3, 1, 0, 2, 4]])
    assert resample_sources(order, 2).tolist() == [[3, 1, 3, 1, 3]]
    assert resample_sources(order, 5).tolist() == order.tolist()


def test_resampling_copies_the_better_half_with_noise_and_moments() -> None:
    table, generator = random_table(0), torch.Generator().manual_seed(0)
    config = SearchConfig(num_restarts=4)
    group = RestartBatch.initial(table, "layerwise", config, generator, 0, torch.arange(table.num_outer))
    optimizer = Adam([(group.logits, 0.1), (group.widths, 0.1)], (0.5, 0.999))
    (group.logits.square().sum() + group.widths.square().sum()).backward()
    optimizer.step()
    merit = torch.rand(table.num_outer, 4, generator=generator, dtype=torch.float64)
    assert group.logits.grad is not None
    order = rank_starts(merit, group.logits.grad.flatten(2).norm(dim=-1))
    before, widths = group.logits.detach().clone(), group.widths.detach().clone()
    mean = optimizer.moments[0][0].clone()
    group.resample(merit, optimizer.state(), 0.1, generator)
    for o in range(table.num_outer):
        first, second = order[o, :2].tolist()
        assert torch.equal(group.logits[o, :2], before[o, [first, second]])
        assert torch.equal(group.widths[o, :2], widths[o, [first, second]])
        moved = (group.logits[o, 2:] - before[o, [first, second]]).abs()
        assert 0.0 < float(moved.detach().max()) < 1.0
        assert torch.equal(optimizer.moments[0][0][o], mean[o, [first, second, first, second]])
