from dataclasses import replace
from statistics import median

import pytest
import torch

from darts_parallel.bilevel._quantize import lossy_sum
from darts_parallel.cost.collectives import BLOCK
from darts_parallel.errors import UnsupportedError
from darts_parallel.plans.legality import refuse_unexecutable
from darts_parallel.plans.strategy import LayerStrategy as Strategy
from darts_parallel.plans.strategy import Plan
from darts_parallel.run._lossy import pack, unpack
from darts_parallel.run._verify import TOLERANCE
from darts_parallel.run.measure import with_exact_collectives
from darts_parallel.run.workers import Workers
from tests.support.running import LLAMA, reduced, tiny, verified
from tests.support.virtual_ranks import VirtualGradients, rounded_alike


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_packed_numbers_take_their_bits_and_come_back_rounded(bits: int) -> None:
    rows = torch.randn(3, 2 * BLOCK, generator=torch.Generator().manual_seed(0))
    packed = pack(rows, bits)
    assert packed[0].numel() == rows.numel() * bits // 8
    assert (packed[1].dtype, packed[1].numel()) == (torch.float32, rows.numel() // BLOCK)
    back = unpack(packed, bits)
    half = torch.unflatten(rows, 1, (-1, BLOCK)).abs().amax(-1) / (2 ** (bits - 1) - 1) / 2
    error = torch.unflatten(back - rows, 1, (-1, BLOCK)).abs().amax(-1)
    assert (error <= half * (1 + 1e-5)).all()
    torch.testing.assert_close(unpack(pack(back, bits), bits), back)
    assert not unpack(pack(torch.zeros(1, BLOCK), bits), bits).any()


def test_four_gloo_ranks_hold_what_the_virtual_ranks_of_the_loop_do() -> None:
    """Sizes that fill blocks and shares and sizes that do not."""
    with Workers(4) as workers:
        for size, bits in ((4 * BLOCK, 8), (1000, 4), (1000, 2)):
            answers = workers.run(reduced, size, bits)
            partials = torch.stack(
                [
                    torch.randn(size, generator=torch.Generator().manual_seed(rank))
                    for rank in range(4)
                ]
            )
            for answer in answers:
                torch.testing.assert_close(answer, lossy_sum(partials, bits), rtol=1e-5, atol=1e-6)


WIDE = ("model.hidden_size=64", "model.num_heads=4")
"""A token's state is one block of numbers, whose scale depends on no other token."""
MIXED = Plan(
    2,
    (0, 2, 5),
    (
        Strategy(1, 2),
        Strategy(2, 1, tp_comm_bits=4),
        Strategy(1, 2, 1, grad_comm_bits=2),
        Strategy(1, 2),
        Strategy(1, 2),
    ),
)
"""Two stages of two ranks: sums at 4 bits in the first, gradients at 2 bits by ZeRO 1 in the second."""
BOTH = Plan(
    1,
    (0, 5),
    (Strategy(1, 4), *(Strategy(2, 2, 0, "full", False, 4, 4),) * 2, *(Strategy(1, 4),) * 2),
)
"""Sums and gradients at 4 bits on four ranks, with recomputation."""


@pytest.mark.slow
def test_a_plan_of_few_bits_has_the_loss_and_gradients_of_its_virtual_ranks() -> None:
    with Workers(4, 120.0) as workers:
        for plan, overrides in ((MIXED, WIDE), (BOTH, (*LLAMA, *WIDE))):
            problem = tiny(4, *overrides)
            refuse_unexecutable(plan, problem)
            verdict = workers.run(rounded_alike, problem, plan, 0)[0]
            assert all(entry.passed for entry in verdict.bytes)
            # the order of a sum decides on which of two levels a number falls, and so moves later ones
            assert (verdict.loss_error < 1e-2, verdict.worst[1] < 0.3) == (True, True)
            # a processor that sums in another order moves single numbers to the next level
            loss, wanted = verdict.losses[0]
            error = abs(loss / wanted - 1.0)
            assert median(verdict.gradients.values()) < 0.25  # 0.13 on an EPYC; unrelated: 1
            exact = with_exact_collectives(plan)
            other = workers.run(verified, problem, exact, (0, 0))[0]
            assert other.passed
            # without rounding the loss differs by far more
            assert abs(other.losses[0][0] / loss - 1.0) > max(5 * error, 100 * TOLERANCE)
            assert other.worst[1] <= TOLERANCE


@pytest.mark.parametrize(
    ("strategy", "nearest"),
    [
        (Strategy(2, 2, sequence_parallel=True, tp_comm_bits=4), "space.sequence_parallel=false"),
        (Strategy(1, 4, 2, grad_comm_bits=4), "space.zero_stage"),
    ],
)
def test_few_bits_that_no_collective_here_sends_are_refused(
    strategy: Strategy, nearest: str
) -> None:
    plan = Plan(1, (0, 5), (Strategy(1, 4), *(strategy,) * 2, *(Strategy(1, 4),) * 2))
    with pytest.raises(UnsupportedError, match=nearest):
        refuse_unexecutable(plan, tiny(4))
    with pytest.raises(UnsupportedError, match="only dense blocks"):
        refuse_unexecutable(
            replace(plan, layers=(Strategy(1, 4, grad_comm_bits=4), *plan.layers[1:])), tiny(4)
        )


def test_finest_ranks_that_are_one_rank_of_a_block_add_their_gradients() -> None:
    block = VirtualGradients(torch.nn.Linear(1, 1), Strategy(tp=1, dp=2))
    finest = [{"weight": torch.tensor(2.0**rank)} for rank in range(4)]
    assert [float(own["weight"]) for own in block._by_rank(finest)] == [3.0, 12.0]
