import os
import re
import shlex
import subprocess
import sys

import golden
import pytest

MEGATRON = os.environ.get("MEGATRON") or None
"""A folder of Megatron-LM, whose arguments are no part of the package megatron-core."""

PARSE = """
from megatron.training.arguments import parse_args
a = parse_args()  # ends at a flag that it does not know
sizes = (a.pipeline_model_parallel_size, a.tensor_model_parallel_size, a.context_parallel_size)
print(*sizes, a.global_batch_size)
"""
"""What a process of its own runs: the checkout brings its own megatron.core."""


def flags(name: str) -> list[str]:
    """The flags of a golden script as the shell hands them over."""
    lines = golden.read(name, "megatron.sh").splitlines()
    own = [line for line in lines if line.startswith("    --") and not line.endswith("\\")]  # not torchrun's
    return [word for line in own for word in shlex.split(line)]


@pytest.mark.parametrize("name", golden.cases("megatron"))
def test_the_layout_of_the_stages_is_read_as_the_plan_cuts_them(name: str) -> None:
    layouts = pytest.importorskip("megatron.core.transformer.pipeline_parallel_layer_layout")
    _, plan = golden.built(name)
    given = flags(name)
    if "--pipeline-model-parallel-layout" not in given:
        return
    text = given[given.index("--pipeline-model-parallel-layout") + 1]
    read = layouts.PipelineParallelLayerLayout.from_str(text, plan.pp)
    counts = [len(stage[0]) for stage in read.layout]
    blocks = [sum(1 for kind in stage[0] if "decoder" in str(kind).lower()) for stage in read.layout]
    written = [sum(int(n or 1) for n in re.findall(r"t(?:\*(\d+))?", part)) for part in text.split("|")]
    assert blocks == written
    assert len(counts) == plan.pp


@pytest.mark.skipif(MEGATRON is None, reason="MEGATRON=FOLDER names a checkout of Megatron-LM")
@pytest.mark.parametrize("name", golden.cases("megatron"))
def test_megatron_knows_every_flag(name: str) -> None:
    problem, plan = golden.built(name)
    assert MEGATRON is not None
    done = subprocess.run(
        [sys.executable, "-c", PARSE, *flags(name)],
        env={**os.environ, "PYTHONPATH": MEGATRON},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    batch = problem.training.global_batch_size
    expected = [plan.pp, plan.layers[0].tp, plan.cp, batch]
    assert [int(number) for number in done.stdout.split()[-4:]] == expected
