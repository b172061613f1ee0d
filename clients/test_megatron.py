import os
import re
import shlex
import sys

import golden
import pytest

MEGATRON = os.environ.get("MEGATRON") or None
"""A folder of Megatron-LM, whose arguments are no part of the package megatron-core."""


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
def test_megatron_knows_every_flag(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(MEGATRON)
    arguments = pytest.importorskip("megatron.training.arguments")
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *flags(name)])
    parsed = arguments.parse_args()  # ends the program at a flag that it does not know
    _, plan = golden.built(name)
    assert parsed.tensor_model_parallel_size == plan.layers[0].tp
    assert parsed.pipeline_model_parallel_size == plan.pp
