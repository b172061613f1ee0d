import json

import pytest

from darts_parallel.errors import UnsupportedError
from darts_parallel.export import export_plan
from darts_parallel.plan.strategy import LayerStrategy, Plan
from darts_parallel.problem.problem import load_problem

PROBLEM = load_problem(["model=toy", "cluster=toy", "training=toy", "training.global_batch_size=16"])


def plan(**changes: int) -> Plan:
    devices, layers = PROBLEM.cluster.num_devices, len(PROBLEM.model.layers)
    return Plan(1, (0, layers), (LayerStrategy(1, devices, **changes),) * layers)  # type: ignore[arg-type]


def test_four_bit_gradients_of_zero_3_are_deepspeeds_own_switch() -> None:
    for bits, expected in ((4, True), (16, None)):
        exported = export_plan(PROBLEM, plan(zero_stage=3, grad_comm_bits=bits), "deepspeed")
        settings = json.loads(exported.files["deepspeed.json"])["zero_optimization"]
        assert settings.get("zero_quantized_gradients") is expected


@pytest.mark.parametrize(
    ("target", "changes"),
    [
        ("deepspeed", {"zero_stage": 1, "grad_comm_bits": 4}),
        ("deepspeed", {"zero_stage": 3, "grad_comm_bits": 2}),
        ("megatron", {"zero_stage": 1, "grad_comm_bits": 4}),
    ],
)
def test_bits_without_a_switch_are_refused_with_a_sentence(target: str, changes: dict[str, int]) -> None:
    with pytest.raises(UnsupportedError, match=r"grad_comm_bits=.*no such quantized.*nearest"):
        export_plan(PROBLEM, plan(**changes), target)
