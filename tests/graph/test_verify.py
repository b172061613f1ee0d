"""Check that files compute the module, and that what no plan can compute is refused."""

import json
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from darts_parallel.config.composition import load_config
from darts_parallel.errors import ConfigError, UnsupportedError
from darts_parallel.graph import command, verify
from darts_parallel.graph._rules import unknown_operators
from darts_parallel.graph.alternatives import (
    BATCH,
    SHARDED,
    TENSOR,
    Alternative,
    alternatives,
)
from darts_parallel.graph.capture import capture_module, load_module, make_inputs
from darts_parallel.graph.command import run_request
from darts_parallel.graph.execute import plan_script
from darts_parallel.graph.layers import derived_keys
from darts_parallel.graph.plan import GraphPlan, plan_module
from darts_parallel.run.workers import Workers
from tests.graph import named_modules
from tests.graph.named_modules import COMPUTED, REFUSED, WIDTH, made
from tests.graph.running import FAST, captured, check_file, mesh, plan_made

HERE = "tests.graph.named_modules"


@pytest.mark.parametrize("kind", COMPUTED, ids=lambda kind: kind.__name__)
def test_named_modules_are_one_process(two: Workers, kind: type[nn.Module]) -> None:
    """The plan on fast links, and random choices of every operator."""
    make = partial(made, kind)
    for seed in (None, 0, 1):
        plan = plan_made(make, (2,), seed)
        check_file(two, make, plan_script(plan), plan)


def test_operators_without_a_rule_are_written_as_others() -> None:
    assert not unknown_operators(captured(partial(made, named_modules.Composed)))


def test_branches_that_are_multiplied_by_zero_are_seen() -> None:
    """Scales of zero get noise before a file is compared; inputs are drawn for which there are numbers."""
    module, inputs = verify._made(f"{HERE}:scaled_to_zero", [[2, 16, WIDTH], [2, 16, "bool"]], 2)
    assert module.scale.any()
    assert not module(*inputs).isnan().any()
    assert not inputs[1].any()


@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
def test_what_cannot_be_written_is_refused_in_one_sentence(kind: type[nn.Module]) -> None:
    with torch.device("meta"):
        module = kind()
    with pytest.raises(UnsupportedError, match=REFUSED[kind]) as caught:
        capture_module(module, make_inputs([[2, 16, WIDTH]]))
    assert "\n" not in str(caught.value)
    assert "; try " in str(caught.value)


def test_a_factory_that_exits_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"exiting\(\) fails \(SystemExit"):
        load_module(f"{HERE}:exiting")


def run_command(folder: Path, name: str, *more: str) -> tuple[list[str], dict[str, Any]]:
    arguments = [f"module={HERE}:{name}", "mesh=[2]", "descent=false", f"hydra.run.dir={folder}"]
    lines = run_request([*arguments, *FAST, *more])
    return lines, json.loads((folder / "graph.json").read_text())


@pytest.fixture
def running(two: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let commands use processes that run already; those that a failed job stopped would check nothing."""
    assert two._processes
    monkeypatch.setattr("darts_parallel.run.Workers", lambda count, timeout_s: nullcontext(two))


def test_a_plan_is_run_before_it_is_reported(tmp_path: Path) -> None:
    """The mask has 16 tokens: fewer do not export."""
    lines, data = run_command(tmp_path, "masked", f"inputs=[[3,16,{WIDTH}]]")
    assert data["verified"] is True
    assert data["proven"]
    assert any(line.startswith("verified: ") for line in lines)
    assert any("; proven: " in line for line in lines)
    assert (tmp_path / "parallel_plan.py").exists()


def test_code_that_asks_for_its_device_is_verified(tmp_path: Path) -> None:
    """The experts of transformers do; the module is captured on the meta device, and run on this one."""
    _, data = run_command(tmp_path, "asking", f"inputs=[[3,16,{WIDTH}]]")
    assert data["verified"] is True


@pytest.mark.usefixtures("running")
def test_constants_of_the_code_keep_their_numbers(tmp_path: Path) -> None:
    """The module is captured on the meta device, which has none."""
    _, data = run_command(tmp_path, "constant", f"inputs=[[3,16,{WIDTH}]]")
    assert data["verified"] is True
    assert "[0.25, -0.25]" in (tmp_path / "parallel_plan.py").read_text()


@pytest.mark.usefixtures("running")
def test_lists_of_indices_keep_their_numbers(tmp_path: Path) -> None:
    _, data = run_command(tmp_path, "listed", f"inputs=[[2,16,{WIDTH}]]")
    assert data["verified"] is True


@pytest.mark.usefixtures("running")
def test_a_module_that_keeps_what_it_computed_is_verified(tmp_path: Path) -> None:
    """The inputs are tried on a copy: a tensor with a history cannot be copied."""
    _, data = run_command(tmp_path, "remembering", f"inputs=[[2,16,{WIDTH}]]")
    assert data["verified"] is True


def test_a_constant_without_numbers_is_refused() -> None:
    with torch.device("meta"):
        module = named_modules.Nested()
    with pytest.raises(
        UnsupportedError, match=r"constant .* has no numbers; try a tensor of the CPU"
    ):
        capture_module(module, make_inputs([[2, 16, WIDTH]]))


@pytest.mark.usefixtures("running")
def test_a_wrong_plan_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that computes another function is found."""

    def other(plan: GraphPlan) -> str:
        return plan_script(plan).replace("aten.relu", "aten.sigmoid")

    monkeypatch.setattr(verify, "plan_script", other)
    lines, data = run_command(tmp_path, "pair", f"inputs=[[3,16,{WIDTH}]]")
    assert data["verified"] is False
    assert any("WRONG" in line for line in lines)
    assert not (tmp_path / "parallel_plan.py").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("raised", "verified"),
    [
        ("NotImplementedError('no kernel')", None),
        ("ValueError('NotImplementedError')", False),
        ("KeyError('x')", False),
    ],
)
def test_only_an_operator_that_is_missing_here_leaves_a_plan_unverified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raised: str, verified: bool | None
) -> None:
    """The type of the error decides, whatever its words are."""

    def failing(plan: GraphPlan) -> str:
        lines = plan_script(plan).splitlines()
        place = next(k for k, line in enumerate(lines) if "aten.relu" in line)
        indent = " " * (len(lines[place]) - len(lines[place].lstrip()))
        return "\n".join([*lines[:place], f"{indent}raise {raised}", *lines[place:]])

    monkeypatch.setattr(verify, "plan_script", failing)
    _, data = run_command(tmp_path, "pair", f"inputs=[[3,16,{WIDTH}]]")
    assert data["verified"] is verified
    assert raised.split("'")[1] in data["verified_reason"]


@pytest.mark.parametrize(
    ("more", "reason"), [(["verify=false"], "verify=false"), ([], "parameters are more than 1,000")]
)
def test_a_plan_that_is_not_run_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: list[str], reason: str
) -> None:
    monkeypatch.setattr(verify, "MOST_PARAMETERS", 1000)
    lines, data = run_command(tmp_path, "pair", f"inputs=[[3,16,{WIDTH}]]", *more)
    assert data["verified"] is None
    assert reason in data["verified_reason"]
    assert any(line.startswith("not verified: ") for line in lines)
    assert (tmp_path / "parallel_plan.py").exists()


def train_split(text: str, batch: int) -> list[float]:
    """Train on this rank's part of a batch; return its gradients next to those of the whole batch."""
    file: dict[str, Any] = {}
    exec(text, file)
    torch.manual_seed(0)
    whole, split = named_modules.stack(), named_modules.stack()
    split.load_state_dict(whole.state_dict())
    group = init_device_mesh("cpu", (2,))
    x = torch.randn(batch, 4, WIDTH)
    part = x.chunk(2)[group.get_local_rank()]
    trained = file["parallelize"](split.eval(), group)
    trained(part).sin().mean().backward()
    whole.eval()(x).sin().mean().backward()
    differences = []
    for own, one in zip(split.parameters(), whole.parameters(), strict=True):
        gradient = own.grad.full_tensor() if hasattr(own.grad, "full_tensor") else own.grad
        differences.append(float((gradient - one.grad).abs().max() / one.grad.abs().max()))
    return differences


@pytest.mark.slow
def test_a_stack_that_tensor_parallelism_does_not_speed_up_has_an_answer(two: Workers) -> None:
    """Narrow blocks and a large batch: parts of the batch are faster, and their files train."""
    path, shapes = f"{HERE}:stack", [[4096, 64, WIDTH]]
    plan = plan_module(load_module(path), make_inputs(shapes), mesh(2)).plan
    found = alternatives(plan, plan_script(plan), path, shapes)
    assert [one.name for one in found] == [TENSOR, BATCH, SHARDED]
    tensor, batch, sharded = found
    assert batch.seconds < tensor.seconds
    assert sharded.bytes < batch.bytes
    for one in (batch, sharded):
        for differences in two.run(train_split, one.text, 4):
            assert max(differences) < 1e-4
    assert len(alternatives(plan, "", path, [[3, 64, WIDTH]])) == 1


def test_the_command_names_the_fastest_and_writes_its_file(tmp_path: Path) -> None:
    _, data = run_command(tmp_path, "stack", f"inputs=[[4096,64,{WIDTH}]]", "verify=false")
    assert data["fastest"] == BATCH
    assert "DistributedDataParallel(module" in (tmp_path / "parallel_plan.py").read_text()
    assert (tmp_path / "tensor_plan.py").exists()


def test_the_fastest_way_keeps_the_memory_that_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def asked(found: list[Alternative], memory: float) -> Alternative:
        seen.append(memory)
        return found[0]

    monkeypatch.setattr(command, "fastest", asked)
    run_command(tmp_path, "pair", f"inputs=[[4,64,{WIDTH}]]", "verify=false", "memory=0.5")
    assert seen == [2.0**29]


def test_a_tensor_is_as_wide_as_the_precision(tmp_path: Path) -> None:
    arguments = ["pair", f"inputs=[[4096,64,{WIDTH}]]", "verify=false"]
    kept = []
    for precision in ("bf16", "fp32"):
        _, data = run_command(tmp_path, *arguments, f"training.precision={precision}")
        kept.append(data["alternatives"][0]["bytes"])
    assert kept[1] == pytest.approx(2.0 * kept[0], rel=0.01)


def test_a_module_says_its_hidden_size() -> None:
    """The keys that are not given make a command that works."""
    job = ["model=module", f"model.path={HERE}:pair", "model.num_layers=4", "model.vocab_size=1000"]
    keys = derived_keys(job)
    assert keys[1] == f"model.hidden_size={WIDTH}"
    config = load_config([*job, *keys, "training.seq_len=64"])
    assert list(config.model.inputs[0]) == [1, 64, WIDTH]
    assert derived_keys([*job, "model.hidden_size=32"]) == keys[:1]
    assert derived_keys([*job, *keys]) == []
    assert derived_keys(["model=llama3_8b"]) == []


def test_a_module_that_is_no_block_is_refused() -> None:
    job = ["model=module", f"model.path={HERE}:convolution"]
    with pytest.raises(UnsupportedError, match=r"try model.inputs=.*model.hidden_size="):
        derived_keys(job)


def test_results_of_another_shape_or_type_are_wrong_whatever_their_values() -> None:
    one = torch.ones(2, 3)
    assert verify._difference(one[0], one, 0.0) == float("inf")
    assert verify._difference(one.double(), one, 0.0) == float("inf")
    assert verify._difference(1.5 * one, one, 0.0) == 0.5


def test_infinite_results_are_equal_or_wrong() -> None:
    """Masks of minus infinity are no difference; a number that is missing is one, wherever it stands."""
    mask = torch.tensor([0.5, float("-inf")])
    assert verify._difference(mask, mask, 0.0) == 0.0
    assert verify._difference(mask.flip(0), mask, 0.0) == float("inf")
    run = verify.FileRun({"output 0": 0.0, "output 1": float("nan")}, {})
    assert "output 1 differs" in verify._fault(run, {})


class Undefined(nn.Module):
    """Its second output is no number."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x - torch.inf * x.relu()


def test_a_module_that_computes_nan_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN equals nothing, so a right file would be called wrong."""
    monkeypatch.setattr("torch.distributed.device_mesh.init_device_mesh", lambda *_, **__: None)
    text = "INPUTS = ('x',); distribute = lambda named, *_: named; parallelize = lambda own, _: own"
    with pytest.raises(
        UnsupportedError, match=r"one process fails: it computes NaN; try verify=fa"
    ):
        verify.run_file(lambda: (Undefined(), [torch.zeros(2)]), text, (1,))
