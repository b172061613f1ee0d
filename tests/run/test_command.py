"""The run's command: settings, refusals before any process starts, lost processes, and torchrun itself."""

import importlib
import multiprocessing
import os
import re
import signal
import socket
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import darts_parallel.run
from darts_parallel.cost.evaluation import evaluate
from darts_parallel.errors import DartsParallelError, UnsupportedError
from darts_parallel.plans.file import write_json
from darts_parallel.plans.legality import refuse_unexecutable
from darts_parallel.plans.space import outer_spaces
from darts_parallel.plans.strategy import LayerStrategy, Plan
from darts_parallel.problem.problem import Problem, load_problem
from darts_parallel.report.outcome import Outcome
from darts_parallel.report.plan_json import plan_dict
from darts_parallel.run.__main__ import main
from darts_parallel.run.launch import LocalMachine, device_for, leave, require_torch
from darts_parallel.run.workers import GroupError, Workers, preloaded, process_group
from tests.support.processes import torchrun
from tests.support.running import TINY, die, hang, tiny, uniform

LARGE, CPU = LocalMachine((), 2.0**40), torch.device("cpu")


def plan_file(folder: Path, plan: Plan, problem: Problem) -> Path:
    path = folder / "plan.json"
    write_json(path, plan_dict(Outcome(problem, plan, evaluate(plan, problem))))
    return path


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """A plan of two stages."""
    return plan_file(
        tmp_path, uniform((0, 2, 5), 2, LayerStrategy(1, 1, recompute="full")), tiny(2)
    )


def command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["run", *arguments])
    return main()


def test_the_run_starts_its_processes_and_reports_what_it_measured(
    two: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = (f"plan={two}", "verify=true", "steps=2", "timeout_s=120")
    assert command(monkeypatch, *arguments) == 0
    out = capsys.readouterr().out
    assert "Against one process" in out
    assert "differs" not in out
    assert re.search(r"measured 0\.\d+ s per iteration \(median of 2, ", out)
    assert re.search(r"predicted 0\.\d+ s; measured / predicted = ", out)
    stages = out.partition("Seconds of a step by stage")[2]
    assert re.findall(r"(?m)^ *(\d) .* MiB *$", stages) == ["0", "1"]


@pytest.mark.slow
def test_ranks_of_torchrun_agree_with_one_process_and_the_first_says_so(
    tmp_path: Path, two: Path
) -> None:
    arguments = ["--standalone", "--nproc-per-node", "2", "-m", "darts_parallel.run", f"plan={two}"]
    arguments += ["verify=true", "steps=1", "timeout_s=120"]
    process = preloaded().Process(
        target=torchrun, args=(tmp_path / "said.txt", arguments), daemon=True
    )
    process.start()
    process.join(120.0)
    said = (tmp_path / "said.txt").read_text()
    assert process.exitcode == 0, said
    assert said.count("toy on 2 processes (cpu)") == said.count("Against one process") == 1
    assert "differs" not in said
    assert "Warning" not in said


def test_a_rank_of_torchrun_ends_without_taking_the_interpreter_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[int] = []
    monkeypatch.setattr(os, "_exit", found.append)
    for variables, ended in (({}, []), ({"WORLD_SIZE": "2"}, [3])):
        monkeypatch.setattr(os, "environ", variables)
        with pytest.raises(SystemExit, match="3"):
            leave(3)
        assert found == ended


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "plan is missing"),
        (("plan=none.json",), "cannot be read"),
        (("plan=x", "device=tpu"), "device=tpu must be one of auto, cpu, cuda"),
        (("plan=x", "stepz=3"), "stepz=3 is not a key of the configuration; try steps"),
    ],
)
def test_a_wrong_setting_is_one_sentence(
    arguments: tuple[str, ...],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command(monkeypatch, *arguments) == 2
    assert words in capsys.readouterr().err


def test_an_older_torch_is_refused_in_one_sentence_by_code_that_needs_nothing_that_it_lacks(
    two: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch, "__version__", "2.4.1+cu121")
    monkeypatch.setattr(sys, "argv", ["run", f"plan={two}"])
    sentence = "torch 2.4.1+cu121 is installed, and to run a plan takes torch 2.13 or newer"
    with pytest.raises(UnsupportedError, match=re.escape(sentence)):
        require_torch()
    monkeypatch.setattr(darts_parallel, "run", darts_parallel.run)  # to be as before in the end
    for name in [name for name in sys.modules if f"{name}.".startswith("darts_parallel.run.")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("tensor", "fsdp", "pipelining"):
        monkeypatch.setitem(sys.modules, f"torch.distributed.{name}", None)  # an import of it fails
    assert importlib.import_module("darts_parallel.run.__main__").main() == 2
    assert (
        capsys.readouterr().err
        == f'darts_parallel.run: {sentence}; try pip install "torch>=2.13".\n'
    )


def test_every_torch_below_the_needed_one_is_refused_and_newer_ones_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for older in ("1.13.1", "2.9.0", "2.12.9"):
        monkeypatch.setattr(torch, "__version__", older)
        with pytest.raises(UnsupportedError):
            require_torch()
    for newer in ("2.13.0+cpu", "2.14.0a0+git1234567", "3.0.0"):
        monkeypatch.setattr(torch, "__version__", newer)
        require_torch()


def test_a_plan_for_gpus_is_refused_without_one_unless_the_user_insists_and_one_that_does_not_fit() -> (
    None
):
    plan = uniform((0, 5), 1, LayerStrategy(1, 1))
    a10, h100 = (load_problem([*TINY, f"cluster={name}"]) for name in ("a10_4x4", "h100_1x8"))
    with pytest.raises(
        UnsupportedError, match=r"for 16 x a10, and this machine has no GPU; .*device=cpu"
    ):
        device_for(a10, plan, "auto", LARGE)
    assert device_for(a10, plan, "cpu", LARGE) == "cpu"
    other = LocalMachine(("NVIDIA H100 80GB HBM3",), 2.0**40)
    with pytest.raises(UnsupportedError, match="for a10, and this machine has NVIDIA H100"):
        device_for(a10, plan, "auto", other)
    assert device_for(a10, plan, "cuda", other) == "cuda"
    assert device_for(h100, plan, "auto", other) == "cuda"
    assert device_for(tiny(1), plan, "auto", other) == "cpu", "so slow a device is a CPU"
    with pytest.raises(UnsupportedError, match=r"this machine has 0\.0 GiB free"):
        device_for(tiny(1), plan, "cpu", LocalMachine((), 1.0))


@pytest.mark.parametrize(
    ("change", "overrides", "words"),
    [
        ({"cp": 2}, (), "cp=2 cannot run"),
        ({"node_order": (0,)}, (), "space.node_orders=given"),
        ({"layer": {"tp_comm_bits": 8}}, (), "embedding has tp_comm_bits=8"),
        ({"layer": {"grad_comm_bits": 4}}, (), "embedding has grad_comm_bits=4"),
        (
            {"layer": {"sequence_parallel": True}},
            ("training.seq_len=7",),
            "must divide training.seq_len=7",
        ),
        ({}, ("model.num_encoder_layers=1",), "model.num_encoder_layers=1"),
        (
            {
                "boundaries": (0, 2, 5),
                "schedule": "zero_bubble_h1",
                "layer": {"tp": 1, "zero_stage": 2},
            },
            (),
            "splits backward passes",
        ),
        ({"num_micro_batches": 3}, (), "must divide training.global_batch_size=8"),
    ],
)
def test_what_cannot_run_is_named(
    change: dict[str, object], overrides: tuple[str, ...], words: str
) -> None:
    problem = tiny(4, *overrides)
    layer = replace(LayerStrategy(2, 2), **change.pop("layer", {}))  # type: ignore[arg-type]
    plan = replace(uniform((0, problem.num_layers), 2, layer), **change)  # type: ignore[arg-type]
    with pytest.raises(DartsParallelError, match=words):
        refuse_unexecutable(plan, problem)


def test_the_executable_space_holds_only_what_runs() -> None:
    overrides = ["training.seq_len=6", "training.precision=fp32"]
    free = load_problem([*TINY, *overrides])
    bound = load_problem(
        [*TINY, *overrides, "space=executable", "space.schedules=[1f1b,zero_bubble_h1]"]
    )
    assert bound.config.space.kind == "layerwise"
    for problem in (free, bound):
        choices = [
            choice for space in outer_spaces(problem) if space.pp == 2 for choice in space.choices
        ]
        assert {c.tp for c in choices if c.sequence_parallel} == {2}
        assert 4 in {c.tp for c in choices}
    for space in outer_spaces(bound):
        for choice in space.choices:
            units = [*range(space.pp), bound.num_layers]
            counts = [m for m in space.num_micro_batches if 8 % (m * choice.dp) == 0]
            layers = (choice,) * bound.num_layers
            refuse_unexecutable(
                Plan(counts[0], tuple(units), layers, schedule=space.schedule), bound
            )
    with pytest.raises(UnsupportedError, match=r"model\.num_encoder_layers"):
        outer_spaces(load_problem([*TINY, "space=executable", "model.num_encoder_layers=1"]))
    with pytest.raises(DartsParallelError, match=r"space\.tp_comm_bits=8 must be 16 with space"):
        load_problem([*TINY, "space=executable", "space.tp_comm_bits=8"])


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_process_that_dies_stops_all_others_at_once() -> None:
    for killed, sentence in (
        (None, "rank 1 died (exit status 7)"),
        (0, "rank 0 died (signal SIGKILL)"),
    ):
        workers = Workers(2)
        pids = [process.pid or -1 for process in workers._processes]
        if killed is not None:
            os.kill(pids[killed], signal.SIGKILL)
        with pytest.raises(GroupError, match=re.escape(sentence)):
            workers.run(die, 1 if killed is None else 5)
        assert not any(alive(pid) for pid in pids)
        with pytest.raises(GroupError, match="were stopped"):  # and no empty answer
            workers.run(die, 1)


def test_an_exit_status_is_read_after_the_pool_has_read_it() -> None:
    process = SimpleNamespace(exitcode=None)
    with Workers(0) as workers:
        pass
    workers._processes = [process]
    workers._pools = [SimpleNamespace(shutdown=lambda: setattr(process, "exitcode", 7))]
    assert "rank 0 died (exit status 7)" in str(workers._death(0))


def test_a_start_that_is_interrupted_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    submit, others = ProcessPoolExecutor.submit, multiprocessing.active_children()
    monkeypatch.setattr(
        ProcessPoolExecutor, "submit", lambda *a: (submit(*a), signal.raise_signal(2))
    )
    with pytest.raises(KeyboardInterrupt):
        Workers(2)
    assert set(multiprocessing.active_children()) <= set(others)


@pytest.mark.slow
def test_a_process_that_hangs_ends_the_run_after_the_timeout() -> None:
    workers = Workers(2, timeout_s=2.0)
    pids = [process.pid or -1 for process in workers._processes]
    with pytest.raises(GroupError, match="rank 0 lost another process within timeout_s=2"):
        workers.run(hang, 1)
    assert not any(alive(pid) for pid in pids)


def test_a_process_that_never_comes_is_named_after_the_timeout(tmp_path: Path) -> None:
    store = torch.distributed.FileStore(str(tmp_path / "store"), 2)
    with (
        pytest.raises(GroupError, match="rank 0 lost another"),
        process_group(CPU, 0, 2, 0.5, store),
    ):
        raise AssertionError("the group must not stand")
    assert not torch.distributed.is_initialized()


def test_a_taken_port_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setenv("MASTER_ADDR", "localhost")
        monkeypatch.setenv("MASTER_PORT", str(port))
        with (
            pytest.raises(GroupError, match=f"localhost:{port} is taken"),
            process_group(CPU, 0, 1, 5.0),
        ):
            raise AssertionError("the group must not stand")


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({"WORLD_SIZE": "2"}, "RANK must be set where WORLD_SIZE is"),
        (
            {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"},
            "WORLD_SIZE=3 must be the 2 devices of the plan; try torchrun --nproc-per-node 2.\n",
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "two", "MASTER_ADDR": "here", "MASTER_PORT": "1"},
            "WORLD_SIZE=two",
        ),
    ],
)
def test_a_wrong_environment_of_torchrun_is_refused(
    variables: dict[str, str],
    sentence: str,
    two: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert command(monkeypatch, f"plan={two}") == 2
    assert sentence in capsys.readouterr().err
