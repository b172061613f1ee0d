"""`darts-parallel graph`: plan any PyTorch module operator by operator."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from darts_parallel.config import (
    FOLDER,
    given_values,
    load_config,
    one_of,
    parse,
    ranged,
    require,
    run_folder,
    run_subcommand,
)
from darts_parallel.graph._picture import picture
from darts_parallel.graph.alternatives import alternative_lines, alternatives, fastest
from darts_parallel.graph.capture import load_module, make_inputs
from darts_parallel.graph.execute import plan_script
from darts_parallel.graph.layers import command_lines
from darts_parallel.graph.plan import ENDS, make_mesh, plan_module
from darts_parallel.graph.report import graph_dict, report_lines
from darts_parallel.graph.verify import verification
from darts_parallel.plans import write_json, write_text
from darts_parallel.problem import Cluster

HELP = """\
darts-parallel graph module=package.file:make_block inputs=[[2,2048,2048]] [key=value ...]
plans any PyTorch module operator by operator: which named dimension every operator splits on the mesh, which
collectives follow, and by a linear program that no plan of the space is faster.
Importing the module runs its code.

  module=package.file:function   a function without arguments that returns a torch.nn.Module
  inputs=[[2,2048,2048]]         shapes of its inputs; an element type last if not float: [[2,2048,long]]
  cluster=NAME, gpus=, nodes=    the cluster as in the main command (default h100_1x8), with cluster.KEY=...
  training.precision=bf16        bf16, fp16 or fp32
  mesh=[8] or [2,4]              ranks of one or two axes, the last one innermost (default: GPUs of a node)
  memory=GIB                     of a rank for parameters, optimizer states, kept activations (default: any)
  ends=replicated|free           free: inputs and outputs of one shape share a placement, maybe a split
  verify=true|false              run the plan on processes of this machine and compare it with one process
                                 (default: modules of up to 100 million parameters)
  descent=true                   search by gradient descent too, and compare
  time_limit=60                  seconds of each program
  train=true                     search while the toy Transformer of experiment=bilevel trains, in the place
                                 of a module; further keys are overrides of that experiment
  hydra.run.dir=FOLDER           gets graph.json, graph.dot, parallel_plan.py (default: outputs/DATE/TIME);
                                 where a batch split is faster, parallel_plan.py does that, and the operators
                                 are in tensor_plan.py

Options, with their defaults:
"""
MACHINE = ("cluster=", "cluster.", "gpu=", "gpus=", "nodes=", "training.precision=")
"""Beginnings of arguments of the machine around the module."""
WAYS = {
    "tp": "mesh=[{}]",
    "dp": "mesh=[{}]",
    "mbs": "inputs=[[{},2048,2048]]",
    "seq": "inputs=[[2,{},2048]]",
}
"""Options that say here what these words say where layers are planned."""


@dataclass
class GraphRequest:
    """Settings of one command."""

    module: str = ""
    inputs: list[Any] = field(default_factory=list)
    mesh: list[int] = field(default_factory=list)
    """Empty: the GPUs of a node."""
    memory: float | None = ranged(None, 1e-6, 1e6)
    """GiB of a rank."""
    ends: str = one_of("replicated", ENDS)
    verify: bool | None = None
    """Run the plan; null: modules of up to 100 million parameters."""
    descent: bool = True
    seed: int = 0
    time_limit: float = ranged(60.0, 1e-6, 1e6)


def run_request(arguments: Sequence[str]) -> list[str]:
    """Plan the module, write its files, and return the lines of the report.

    Errors:
        ConfigError: a key that does not exist, a value that breaks a rule, or none where one is needed.
    """
    request, job = _split_arguments(arguments)
    config = load_config(job)
    cluster = Cluster.from_config(config.cluster, config.training.precision)
    mesh = make_mesh(cluster, tuple(request.mesh) or None)
    inputs = make_inputs(request.inputs)
    options = {key: getattr(request, key) for key in ("memory", "ends", "time_limit")}
    options["precision"] = config.training.precision
    options["descent"] = request.seed if request.descent else None
    planned = plan_module(load_module(request.module), inputs, mesh, **options)
    plan = planned.plan
    checked = verification(plan, request.module, request.inputs, request.verify)
    text = plan_script(plan)
    found = alternatives(plan, text, request.module, request.inputs)
    best = fastest(found, plan.space.memory or mesh.device.memory)
    folder = run_folder(arguments)
    folder.mkdir(parents=True, exist_ok=True)
    data = graph_dict(planned)
    data |= {"verified": checked.verified, "verified_reason": checked.reason}
    data["alternatives"] = [one.entry() for one in found]
    data["fastest"] = best.name
    write_json(folder / "graph.json", data)
    write_text(folder / "graph.dot", picture(planned))
    tensor, *_ = found
    if best is not tensor:
        write_text(folder / "parallel_plan.py", best.text)
    if checked.verified is not False:
        name = "parallel_plan.py" if best is tensor else "tensor_plan.py"
        write_text(folder / name, text)
    lines = [*report_lines(planned), checked.line, *alternative_lines(found, best)]
    return [*lines, *command_lines(request.module, planned.graph), f"files: {folder}"]


def _split_arguments(arguments: Sequence[str]) -> tuple[GraphRequest, list[str]]:
    """Return the settings of this command, and the arguments of the job around it."""
    job = [one for one in arguments if one.startswith(MACHINE)]
    own = [one for one in arguments if one not in job and not one.startswith(FOLDER)]
    given = given_values(own)
    for word, way in WAYS.items():
        value = given.get(word)
        require(value is None, f"{word}={value}", "be said by mesh or inputs", way.format(value))
    request = parse(GraphRequest, own)
    require(bool(request.module), "module", "be given", "module=package.file:make_block")
    require(bool(request.inputs), "inputs", "be given", "inputs=[[2,2048,2048]]")
    if not any(one.startswith("cluster=") for one in job):
        job.insert(0, "cluster=h100_1x8")
    return request, job


def main(arguments: Sequence[str], run: Callable[[Sequence[str]], list[str]] = run_request) -> None:
    """Run the command: exit status 0, or 2 with one sentence for an error that the user can correct."""
    torch.set_num_threads(1)
    run_subcommand(arguments, HELP, GraphRequest, run)
