"""`darts-parallel graph`: plan any PyTorch module operator by operator.

darts-parallel graph module=package.file:make_block inputs=[[2,2048,2048]] cluster=h100_1x8

The function is imported and called: this runs the user's code. `inputs` lists shapes, with an element type
last where it is not float: `[[2,2048,long]]`.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
import yaml

from darts_parallel.config import error_sentence, load_config
from darts_parallel.errors import ConfigError, begin_command, one_line
from darts_parallel.graph._picture import picture
from darts_parallel.graph.capture import load_module, make_inputs
from darts_parallel.graph.descent import DescentOptions
from darts_parallel.graph.plan import ENDS, WIDTHS, make_mesh, plan_module
from darts_parallel.graph.report import graph_dict, report_lines
from darts_parallel.plan import write_json, write_text
from darts_parallel.problem import Cluster

HELP = """\
darts-parallel graph module=package.file:make_block inputs=[[2,2048,2048]] [key=value ...]
plans any PyTorch module operator by operator: which named dimension every operator splits on the mesh, which
collectives follow, and by a linear programme that no plan of the space is faster.
Importing the module runs its code.

  module=package.file:function   a function without arguments that returns a torch.nn.Module
  inputs=[[2,2048,2048]]         shapes of its inputs; an element type last if not float: [[2,2048,long]]
  cluster=NAME, cluster.KEY=...  the cluster as in the main command (default h100_1x8)
  mesh=[8] or [2,4]              ranks of one or two axes, the last one innermost (default: GPUs of a node)
  memory=GIB                     of a rank for parameters, optimizer states, kept activations (default: any)
  ends=replicated|free           free: inputs and outputs of one shape share a placement, maybe a split
  training.precision=bf16        bf16, fp16 or fp32
  descent=true                   search by gradient descent too, and compare
  seed=0, time_limit=60          of the descent; seconds of each programme
  hydra.run.dir=FOLDER           gets graph.json and graph.svg (default: outputs/DATE/TIME)
"""
KEYS = ("module", "inputs", "mesh", "memory", "ends", "descent", "seed", "time_limit", "training.precision",
        "hydra.run.dir")  # fmt: skip


@dataclass
class GraphRequest:
    """Settings of one command."""

    module: str = ""
    inputs: list[Any] = field(default_factory=list)
    mesh: list[int] | None = None
    memory: float | None = None
    """GiB of a rank."""
    ends: str = "replicated"
    precision: str = "bf16"
    descent: bool = True
    seed: int = 0
    time_limit: float = 60.0
    """Seconds of each programme."""
    folder: Path = Path("outputs")
    cluster: list[str] = field(default_factory=lambda: ["cluster=h100_1x8"])
    """Overrides of the cluster."""


def read_request(arguments: Sequence[str]) -> GraphRequest:
    """Read `key=value` arguments.

    Errors:
        ConfigError: a key that does not exist, a value that breaks a rule, or none where one is needed.
    """
    values: dict[str, Any] = {}
    cluster: list[str] = []
    for argument in arguments:
        key, equals, text = argument.partition("=")
        if key == "cluster" or key.startswith("cluster."):
            cluster.append(argument)
            continue
        if not equals or key not in KEYS:
            raise ConfigError(
                f"{argument} is not a key of darts-parallel graph; try one of {', '.join(KEYS)}."
            )
        try:
            values[key] = text if key in ("module", "hydra.run.dir") else yaml.safe_load(text)  # type: ignore[no-untyped-call]
        except yaml.YAMLError:
            raise ConfigError(f"{argument} cannot be read; try {key}=value, lists in brackets.") from None
    for key, example in (("module", "package.file:make_block"), ("inputs", "[[2,2048,2048]]")):
        if not values.get(key):
            raise ConfigError(f"{key} must be given; try {key}={example}.")
    _check(values)
    folder = values.get("hydra.run.dir") or datetime.now().strftime("outputs/%Y-%m-%d/%H-%M-%S")
    own = {key: values[key] for key in ("module", "inputs", "mesh", "memory", "ends", "descent", "seed",
                                        "time_limit") if key in values}  # fmt: skip
    if not any(argument.startswith("cluster=") for argument in cluster):
        cluster.insert(0, "cluster=h100_1x8")
    precision = values.get("training.precision", "bf16")
    return GraphRequest(**own, precision=precision, folder=Path(folder), cluster=cluster)


def _check(values: dict[str, Any]) -> None:
    """Refuse values of the wrong type."""
    inputs, mesh = values["inputs"], values.get("mesh")
    if not isinstance(inputs, list) or not all(isinstance(shape, list) for shape in inputs):
        raise ConfigError(f"inputs={inputs} must be a list of shapes; try [[2,2048,2048]].")
    if mesh is not None and not isinstance(mesh, list):
        raise ConfigError(
            f"mesh={mesh} must be a list of ranks; try [{mesh if isinstance(mesh, int) else 8}]."
        )
    for key, most in (("memory", 1e6), ("time_limit", 1e6)):
        value = values.get(key, 1.0)
        if value is None and key == "memory":
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 < value <= most:
            raise ConfigError(f"{key}={value} must be a number above 0 and at most {most:g}; try {key}=60.")
    for key, words in (("ends", ENDS), ("training.precision", tuple(WIDTHS))):
        if values.get(key, words[0]) not in words:
            raise ConfigError(f"{key}={values[key]} must be one of {', '.join(words)}; try {words[0]}.")
    if not isinstance(values.get("descent", True), bool):
        raise ConfigError(f"descent={values['descent']} must be true or false; try true.")
    seed = values.get("seed", 0)
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**31:
        raise ConfigError(f"seed={seed} must be a whole number from 0 on; try 0.")


def run_request(request: GraphRequest) -> list[str]:
    """Plan the module, write `graph.json` and `graph.svg`, and return the lines of the report."""
    config = load_config([*request.cluster, f"training.precision={request.precision}"])
    mesh = make_mesh(
        Cluster.from_config(config.cluster, request.precision),
        None if request.mesh is None else tuple(request.mesh),
    )
    inputs = make_inputs(request.inputs)
    planned = plan_module(
        load_module(request.module), inputs, mesh, precision=request.precision, memory=request.memory,
        ends=request.ends, time_limit=request.time_limit,
        descent=DescentOptions(seed=request.seed) if request.descent else None,
    )  # fmt: skip
    request.folder.mkdir(parents=True, exist_ok=True)
    write_json(request.folder / "graph.json", graph_dict(planned))
    write_text(request.folder / "graph.svg", picture(planned))
    return [*report_lines(planned), f"graph: {request.folder / 'graph.json'}",
            f"picture: {request.folder / 'graph.svg'}"]  # fmt: skip


def main(arguments: Sequence[str]) -> None:
    """Run the command: exit status 0, or 2 with one sentence for an error that the user can correct."""
    begin_command()
    torch.set_num_threads(1)
    if not arguments or {"--help", "-h"} & set(arguments):
        print(HELP, end="")
        return
    try:
        for line in run_request(read_request(arguments)):
            print(line)
    except KeyboardInterrupt:
        print("darts-parallel: interrupted before any plan was found.", file=sys.stderr)
        raise SystemExit(2) from None
    except Exception as error:
        sentence = error_sentence(error, arguments)
        if sentence is None:
            raise
        print(f"darts-parallel: {one_line(sentence)}", file=sys.stderr)
        raise SystemExit(2) from None
