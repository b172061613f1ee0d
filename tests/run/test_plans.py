"""Real training steps in real processes, each compared with one process: dimensions alone and combined."""

from dataclasses import replace

import pytest

from darts_parallel.plans.legality import refuse_unexecutable
from darts_parallel.plans.strategy import LayerStrategy as Strategy
from darts_parallel.plans.strategy import Plan
from darts_parallel.run._verify import TOLERANCE
from darts_parallel.run.workers import Workers
from darts_parallel.schedules import find
from tests.support.running import BERT, LLAMA, MIXTURE, gradients, tiny, uniform, verified

PATIENCE_S = 120.0
"""More than a run's own 25 s: eight processes may share the cores with another test's."""
ONE = Strategy(1, 1)
SP = Strategy(2, 1, sequence_parallel=True)
HYBRID = (Strategy(1, 4, 1, shard_size=2), Strategy(1, 4, 3, shard_size=2))
TWO = Strategy(1, 2, 1)
HALVES = ("space.cut=half_block",)
MIXED_HALVES = (*MIXTURE, *HALVES)
MIXED = (
    Strategy(1, 4, 1),
    Strategy(2, 2, 2, "full"),
    Strategy(4, 1, 0, "none", True),
    Strategy(2, 2, 3, "none", True),
    Strategy(4, 1),
)
MIXED_ORDER = (
    "searched:loop;0F0 0F1 0F2 0I0 0F3 0B1 0W0 0I2 0I3 0W2 0W3;1F0 1B0 1F1 1I1 1F2 1W1 1B2 1F3 1B3"
)
CASES = {
    # name: (processes, plan, overrides of the model)
    "one process, gradient accumulation": (1, uniform((0, 5), 4, ONE), ()),
    "recompute full": (1, uniform((0, 5), 2, replace(ONE, recompute="full")), ()),
    "recompute selective, BERT": (1, uniform((0, 5), 2, replace(ONE, recompute="selective")), BERT),
    "ZeRO 0 and 1": (2, Plan(2, (0, 5), (*(Strategy(1, 2, 1),) * 2, *(Strategy(1, 2),) * 3)), ()),
    "ZeRO 2, tied table": (2, uniform((0, 5), 2, Strategy(1, 2, 2)), ()),
    "ZeRO 3, recomputation": (2, uniform((0, 5), 2, Strategy(1, 2, 3, "full")), LLAMA),
    "pipeline of uneven stages, fewer micro-batches": (2, uniform((0, 1, 5), 1, ONE), ()),
    "GPipe": (2, uniform((0, 3, 5), 4, ONE, schedule="gpipe"), LLAMA),
    "interleaved": (2, uniform((0, 1, 2, 3, 5), 4, ONE, chunks=2), ()),
    "ZB-V": (2, uniform((0, 1, 2, 3, 5), 4, ONE, chunks=2, schedule="zero_bubble_v"), LLAMA),
    "ZB-V of few micro-batches": (
        2,
        uniform((0, 1, 2, 3, 5), 2, ONE, chunks=2, schedule="zero_bubble_v_late"),
        LLAMA,
    ),
    "ZB-V, tied table": (
        2,
        uniform((0, 1, 2, 3, 5), 4, ONE, chunks=2, schedule="zero_bubble_v"),
        (),
    ),
    "DualPipe as a V": (2, uniform((0, 1, 2, 3, 5), 4, ONE, chunks=2, schedule="dualpipe"), LLAMA),
    "V-half by its passes": (2, uniform((0, 1, 2, 3, 5), 4, ONE, chunks=2, schedule="v_half"), ()),
    "searched, whole and split": (2, uniform((0, 2, 5), 4, ONE, schedule=MIXED_ORDER), LLAMA),
    "searched, pp 2 x dp 2": (
        4,
        uniform((0, 2, 5), 4, Strategy(1, 2, 1), schedule=MIXED_ORDER),
        LLAMA,
    ),
    "searched, pp 2 x tp 2": (
        4,
        uniform((0, 2, 5), 4, Strategy(2, 1), schedule=MIXED_ORDER),
        LLAMA,
    ),
    "a cut between attention and MLP": (2, uniform((0, 2, 7), 4, ONE), HALVES),
    "halves of their own strategies": (
        2,
        Plan(
            2,
            (0, 7),
            (TWO, SP, TWO, *(replace(own, recompute="full") for own in (TWO, SP)), TWO, TWO),
        ),
        HALVES,
    ),
    "halves of a mixture, tp 2": (
        4,
        uniform((0, 4, 7), 2, replace(SP, recompute="selective")),
        MIXED_HALVES,
    ),
    "halves of a mixture, ZeRO 3": (
        4,
        uniform((0, 4, 7), 2, Strategy(1, 2, 3, "full", ep=2)),
        MIXED_HALVES,
    ),
    "tensor parallel, Llama": (2, uniform((0, 5), 2, Strategy(2, 1)), LLAMA),
    "sequence parallel, BERT": (2, uniform((0, 5), 2, SP), BERT),
    "sequence parallel, normed heads": (
        2,
        uniform((0, 5), 1, replace(SP, recompute="full")),
        LLAMA,
    ),
    "dp 2 x tp 2, ZeRO 1": (4, uniform((0, 5), 2, Strategy(2, 2, 1, "selective", True)), ()),
    "hybrid sharding, ZeRO 1 and 3": (4, Plan(1, (0, 5), (*HYBRID, *HYBRID, HYBRID[1])), LLAMA),
    "unlike copies of a tied table": (
        4,
        Plan(
            2,
            (0, 2, 5),
            (Strategy(2, 1), Strategy(1, 2, 2), Strategy(1, 2), *(Strategy(1, 2, 3),) * 2),
        ),
        (),
    ),
    "unlike copies on one stage": (
        2,
        Plan(2, (0, 5), (Strategy(1, 2, 1), *(Strategy(2, 1),) * 4)),
        (),
    ),
    "degrees that differ inside a stage": (4, Plan(2, (0, 5), MIXED), ()),
    "experts on one process": (1, uniform((0, 5), 2, ONE), MIXTURE),
    "ep 2, ZeRO 1": (2, uniform((0, 5), 2, Strategy(1, 2, 1, ep=2)), MIXTURE),
    "split experts": (2, uniform((0, 5), 2, replace(SP, recompute="full", etp=2)), MIXTURE),
    "experts everywhere, ZeRO 3": (2, uniform((0, 5), 2, Strategy(1, 2, 3)), MIXTURE),
    "pp 2 x ep 2, ZeRO 2": (4, uniform((0, 2, 5), 2, Strategy(1, 2, 2, ep=2)), MIXTURE),
    "tp 2 x dp 2 folded into ep 2 x edp 2, ZeRO 3": (
        4,
        uniform((0, 5), 2, Strategy(2, 2, 3, "full", True, ep=2)),
        MIXTURE,
    ),
    "tp 2 x dp 2 folded into ep 2 x etp 2, ZeRO 2": (
        4,
        uniform((0, 5), 2, Strategy(2, 2, 2, "none", True, ep=2, etp=2)),
        MIXTURE,
    ),
    "pp 2 x tp 2 x dp 2 folded into etp 2 x edp 2": (
        8,
        uniform((0, 2, 5), 2, Strategy(2, 2, 1, "selective", True, etp=2)),
        MIXTURE,
    ),
}


@pytest.mark.parametrize(
    "devices", [1, *(pytest.param(count, marks=pytest.mark.slow) for count in (2, 4, 8))]
)
def test_every_plan_computes_the_step_of_one_process_with_the_predicted_bytes(devices: int) -> None:
    cases = {name: case for name, (count, *case) in CASES.items() if count == devices}
    wrong = {}
    with Workers(devices, PATIENCE_S) as workers:  # all plans of as many processes in the same ones
        for name, (plan, overrides) in cases.items():
            problem = tiny(devices, *overrides)
            refuse_unexecutable(plan, problem)
            verdict = workers.run(verified, problem, plan, (0, 0))[0]
            if not verdict.passed:
                bad = [entry for entry in verdict.bytes if not entry.passed]
                wrong[name] = (verdict.loss_error, verdict.worst, bad)
        # orders that keep each stage's micro-batches in theirs are bitwise equal
        rules = ("1f1b", find("zero_bubble_h1").code(2, 4), MIXED_ORDER) if devices == 2 else ()
        plans = [uniform((0, 2, 5), 4, ONE, schedule=rule) for rule in rules]
        found = [workers.run(gradients, tiny(2, *LLAMA), plan) for plan in plans]
    assert all(own[0] and own == found[0] for own in found)
    assert cases
    assert not wrong


def test_a_step_with_other_weights_does_not_pass() -> None:
    with Workers(1, PATIENCE_S) as workers:
        verdict = workers.run(verified, tiny(1), CASES["recompute full"][1], (1, 0))[0]
    assert verdict.worst[1] > TOLERANCE
    assert verdict.loss_error > TOLERANCE
    assert not verdict.passed
