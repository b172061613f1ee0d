from itertools import count
from pathlib import Path

import torch

from darts_parallel.bilevel.settings import TransformerShape
from darts_parallel.bilevel.transformer import attention_partials, initial_weights, mlp_partials
from darts_parallel.problem.measured_times import read_measured
from experiments.machine.measured_speed import profile_block, shard, write_profile

SHAPE = TransformerShape(num_blocks=1, width=32, num_heads=4, context=8)


def test_a_shard_computes_the_first_ranks_partial_sums() -> None:
    weights = initial_weights(SHAPE, torch.Generator().manual_seed(0))
    state = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(1))
    for tp in (1, 2, 4):
        mine = shard(weights, tp)
        for partials in (attention_partials, mlp_partials):
            torch.testing.assert_close(partials(mine, 0, state, 1)[0], partials(weights, 0, state, tp)[0])


def test_a_profile_has_a_row_for_each_degree_and_micro_batch_and_survives_the_file(tmp_path: Path) -> None:
    ticks = count()
    rows = profile_block(SHAPE, (1, 2, 4), (1, 2), repeats=3, clock=lambda: float(next(ticks)))
    assert [(row.tp, row.micro_batch) for row in rows] == [(t, b) for t in (1, 2, 4) for b in (1, 2)]
    assert all(row.forward_s == 1.0 and row.backward_s == 1.0 for row in rows)
    write_profile(tmp_path / "profile.csv", rows)
    times = read_measured(str(tmp_path / "profile.csv"), "bytes", SHAPE.context, ("toy",), (None, None))
    assert times.degrees == (1, 2, 4)
    tp, sizes = torch.tensor([1.0, 2.0, 4.0]).double(), torch.tensor([[1.0, 1.5, 6.0]]).double()
    forward, backward = times.seconds("toy", "block", tp, sizes) or (tp, tp)
    # proportional beyond the largest micro-batch of 2
    assert forward.tolist() == backward.tolist() == [[1.0, 1.0, 3.0]]
    saved = times.saved_bytes("toy", "block", tp, sizes)
    assert saved is not None
    assert saved[0, 0] == rows[0].saved_bytes


def test_a_finer_shard_holds_fewer_bytes_and_a_larger_micro_batch_keeps_more() -> None:
    rows = {(row.tp, row.micro_batch): row for row in profile_block(SHAPE, (1, 4), (1, 4), repeats=1)}
    assert rows[4, 1].parameter_bytes < rows[1, 1].parameter_bytes / 3
    assert rows[4, 4].saved_bytes < rows[1, 4].saved_bytes
    assert 3 * rows[1, 1].saved_bytes < rows[1, 4].saved_bytes < 4.5 * rows[1, 1].saved_bytes
