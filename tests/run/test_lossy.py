import pytest
import torch

from darts_parallel.bilevel.quantize import lossy_sum
from darts_parallel.cost.collectives import BLOCK
from darts_parallel.run.lossy import pack, time_all_reduce, unpack
from darts_parallel.run.workers import Workers
from tests.support.running import reduced


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_packed_numbers_take_their_bits_and_come_back_rounded(bits: int) -> None:
    rows = torch.randn(3, 2 * BLOCK, generator=torch.Generator().manual_seed(0))
    packed = pack(rows, bits)
    assert packed.levels.numel() == rows.numel() * bits // 8
    assert packed.num_bytes == rows.numel() * bits // 8 + 4 * rows.numel() // BLOCK
    back = unpack(packed, bits)
    half = torch.unflatten(rows, 1, (-1, BLOCK)).abs().amax(-1) / (2 ** (bits - 1) - 1) / 2
    error = torch.unflatten(back - rows, 1, (-1, BLOCK)).abs().amax(-1)
    assert (error <= half * (1 + 1e-5)).all()
    torch.testing.assert_close(unpack(pack(back, bits), bits), back)
    assert not unpack(pack(torch.zeros(1, BLOCK), bits), bits).any()


def test_four_gloo_ranks_hold_what_the_virtual_ranks_of_the_loop_do() -> None:
    """Sizes that fill blocks and shares and sizes that do not; 16 bits are the exact sum."""
    with Workers(4) as workers:
        for size, bits in ((4 * BLOCK, 8), (1000, 4), (1000, 2), (130, 16)):
            answers = workers.run(reduced, size, bits)
            partials = torch.stack([
                torch.randn(size, generator=torch.Generator().manual_seed(rank)) for rank in range(4)
            ])  # fmt: skip
            for answer in answers:
                torch.testing.assert_close(answer, lossy_sum(partials, bits), rtol=1e-5, atol=1e-6)
        assert all(seconds > 0.0 for seconds in workers.run(time_all_reduce, 64, 4, 1))


def test_one_rank_sends_nothing() -> None:
    with Workers(1) as workers:
        assert torch.equal(
            workers.run(reduced, 10, 2)[0], torch.randn(10, generator=torch.Generator().manual_seed(0))
        )
