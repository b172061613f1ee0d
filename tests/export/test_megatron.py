"""Scripts for Megatron-LM, read back."""

import random
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from string import Formatter
from typing import Any

import pytest
import yaml

from darts_parallel.errors import UnsupportedError
from darts_parallel.export import export_plan
from darts_parallel.export.common import Request, written
from darts_parallel.export.megatron import FLAGS, _settings
from darts_parallel.plans.strategy import LayerStrategy, Plan
from darts_parallel.problem.problem import Problem, load_problem
from tests.support.export_plans import CASES, LLAMA, MIXTURE, NAMES, files_of, plan_of


@pytest.fixture(scope="module")
def llama() -> Problem:
    return load_problem(LLAMA)


def flags_of(script: str) -> dict[str, str | None]:
    found = re.findall(r"^    --([\w-]+)(?: (.+))?$", script, re.MULTILINE)
    assert len({name for name, _ in found}) == len(found)
    return {name: value.strip('"') or None for name, value in found}


def parsed_layout(text: str) -> list[str]:
    """The layout's chunks, multiplications written out (the grammar of Megatron-LM's user guide)."""
    return re.sub(r"(.)\*(\d+)", lambda m: m.group(1) * int(m.group(2)), text).split("|")


def boundaries_of(chunks: Sequence[str]) -> tuple[int, ...]:
    """Boundaries in layers of embedding, blocks, head and loss."""
    ends = [0]
    for chunk in chunks:
        ends.append(ends[-1] + len(chunk) + chunk.count("L"))
    return tuple(ends)


@pytest.mark.parametrize("seed", range(30))
def test_a_megatron_script_reads_back_as_the_plan(seed: int, llama: Problem) -> None:
    rng = random.Random(seed)
    pp, virtual = rng.choice([(1, 1), (2, 1), (4, 1), (8, 1), (2, 2), (4, 2)])
    tp = rng.choice([tp for tp in (1, 2) if 8 // pp % tp == 0])
    strategy = LayerStrategy(
        tp, 8 // pp // tp, rng.choice([0, 1]), sequence_parallel=tp > 1 and rng.random() < 0.5
    )
    cuts = sorted(rng.sample(range(1, llama.num_layers - 1), pp * virtual - 1))
    count = rng.choice(
        [m for m in (2, 4, 8, 16) if 16 % (m * strategy.dp) == 0 and (virtual == 1 or m % pp == 0)]
    )
    plan = plan_of(llama, strategy, count, cuts, virtual_stages=virtual)
    flags = flags_of(export_plan(llama, plan, "megatron").files["megatron.sh"])

    assert int(flags["tensor-model-parallel-size"] or 0) == tp
    assert int(flags["pipeline-model-parallel-size"] or 0) == pp
    dp = 8 // pp // tp
    micro, batch = int(flags["micro-batch-size"] or 0), int(flags["global-batch-size"] or 0)
    assert batch == micro * dp * count == 16
    assert ("sequence-parallel" in flags) == strategy.sequence_parallel
    assert ("use-distributed-optimizer" in flags) == (strategy.zero_stage == 1)
    layout = flags.get("pipeline-model-parallel-layout")
    split = flags.get("num-virtual-stages-per-pipeline-rank")
    assert layout is None or split is None
    assert "num-layers-per-virtual-pipeline-stage" not in flags
    if layout is not None:
        chunks = parsed_layout(layout)
    else:
        # without a layout every chunk holds as many layers
        pieces = pp * int(split or 1)
        chunks = ["t" * (8 // pieces) for _ in range(pieces)]
        chunks[0] = "E" + chunks[0]
        chunks[-1] += "L"
    assert boundaries_of(chunks) == plan.boundaries
    # chunk vpp_rank * pp + pp_rank is the virtual stage vpp_rank of the stage pp_rank
    held = [
        i
        for v in range(virtual)
        for i, stage in enumerate(plan.stage_of_layer)
        if stage == 1 % pp and plan.chunk_of_layer[i] == v * pp + 1 % pp
    ]
    assert sum(len(chunks[v * pp + 1 % pp].replace("L", "LL")) for v in range(virtual)) == len(held)


def test_megatron_recomputes_the_first_blocks_of_every_stage_and_no_other_pattern(
    llama: Problem,
) -> None:
    base = LayerStrategy(1, 4, 1)
    full = replace(base, recompute="full")
    uniform = plan_of(llama, base, 4, (5,))

    def recomputing(blocks: Sequence[int]) -> Plan:
        layers = [full if index - 1 in blocks else base for index in range(llama.num_layers)]
        return replace(uniform, layers=tuple(layers))

    flags = flags_of(export_plan(llama, recomputing([0, 2, 4, 5]), "megatron").files["megatron.sh"])
    assert (flags["recompute-method"], flags["recompute-num-layers"]) == ("block", "2")
    flags = flags_of(export_plan(llama, recomputing(range(8)), "megatron").files["megatron.sh"])
    assert (flags["recompute-method"], flags["recompute-num-layers"]) == ("uniform", "1")
    with pytest.raises(UnsupportedError, match=r"recompute=full for \[2, 1\] blocks by stage"):
        export_plan(llama, recomputing([0, 1, 4]), "megatron")
    some = replace(
        uniform, layers=tuple(replace(base, recompute="selective") for _ in uniform.layers)
    )
    flags = flags_of(export_plan(llama, some, "megatron").files["megatron.sh"])
    assert flags["recompute-granularity"] == "selective"


def test_megatron_flags_say_the_model() -> None:
    overrides = ["model.qkv_bias=true", "model.qk_norm=true", "model.head_dim=32"]
    problem = load_problem([*LLAMA, *overrides])
    flags = flags_of(
        export_plan(problem, plan_of(problem, LayerStrategy(1, 8), 2), "megatron").files[
            "megatron.sh"
        ]
    )
    assert {"add-qkv-bias", "qk-layernorm", "swiglu", "disable-bias-linear", "bf16"} <= set(flags)
    assert {"untie-embeddings-and-output-weights", "group-query-attention"} <= set(flags)
    values = {
        "num-layers": 8,
        "hidden-size": 64,
        "ffn-hidden-size": 96,
        "num-attention-heads": 4,
        "num-query-groups": 2,
        "kv-channels": 32,
        "vocab-size": 256,
        "seq-length": 64,
    }
    assert {name: int(flags[name] or 0) for name in values} == values
    assert (flags["normalization"], flags["position-embedding-type"]) == ("RMSNorm", "rope")


def test_files_hold_the_epsilon_of_norms_and_the_base_of_positions() -> None:
    """Llama 3's released values are 1e-5 and 500,000; the programs' own base is 10,000."""
    job = ["model=llama3_8b", "cluster=h100_1x8"]
    problem = load_problem(job)
    plan = plan_of(problem, LayerStrategy(1, 8), 2)
    megatron = export_plan(problem, plan, "megatron")
    flags = flags_of(megatron.files["megatron.sh"])
    assert (float(flags["norm-epsilon"] or 0), flags["rotary-base"]) == (1e-5, "500000")
    nanotron = export_plan(problem, plan, "nanotron")
    for exported in (megatron, nanotron):  # Llama 4 and SmolLM3 have layers without
        assert any("rotary in all layers" in note for note in exported.notes)
    written = yaml.safe_load(nanotron.files["nanotron.yaml"])["model"]["model_config"]
    assert (written["rms_norm_eps"], written["rope_theta"]) == (1e-5, 500000)
    unknown = load_problem([*job, "model.norm_epsilon=null", "model.rotary_base=null"])
    for target, keys in (
        ("megatron", ("--norm-epsilon", "--rotary-base")),
        ("nanotron", ("rope_theta",)),
    ):
        exported = export_plan(unknown, plan, target)
        for key in keys:
            assert any(key in note for note in exported.notes)
    assert not {"norm-epsilon", "rotary-base"} & set(
        flags_of(export_plan(unknown, plan, "megatron").files["megatron.sh"])
    )


@pytest.mark.parametrize("name", sorted({name for name, target in NAMES if target == "megatron"}))
def test_a_megatron_script_is_shell(name: str) -> None:
    bash = shutil.which("bash")
    assert bash is not None
    # a torchrun that prints what it was asked to run
    stub = 'torchrun() { printf "%s\\n" "$@"; }\n' + files_of(name, "megatron")["megatron.sh"]
    run = subprocess.run(
        [bash, "-c", stub, "x", "--lr", "1"], capture_output=True, text=True, check=True
    )
    given = run.stdout.splitlines()
    assert given[-2:] == ["--lr", "1"]
    model = CASES[name].build()[0].config.model
    if model.num_encoder_layers:
        assert "./examples/t5/pretrain_t5.py" in given
        assert given[given.index("--encoder-num-layers") + 1] == str(model.num_encoder_layers)
        return
    assert "./pretrain_gpt.py" in given
    assert given[given.index("--num-layers") + 1] == str(model.num_layers)


def test_a_flag_is_written_where_its_conditions_hold() -> None:
    table: dict[str, dict[str, Any]] = {
        "--always {size} --twice {size}": {},
        "--some": {"size": "some", "kind": ["a"]},
        "--none": {"size": "none"},
        "{words}": {},
    }
    known = {"size": 3, "kind": "a", "words": "--more x y"}
    flags = [("always", "3"), ("twice", "3"), ("some", None), ("more", "x y")]
    assert written(table, known) == flags
    known = {"size": 0, "kind": "a", "words": ""}
    assert written(table, known) == [("always", "0"), ("twice", "0"), ("none", None)]


@pytest.mark.parametrize("section", FLAGS)
def test_the_flags_of_the_table_name_settings(section: str) -> None:
    names = set()
    for text, when in FLAGS[section].items():
        names |= {name.split("[")[0] for _, name, _, _ in Formatter().parse(text) if name}
        names |= set(when)
    hybrid = load_problem(["model=nemotron3_nano_30b_a3b", "cluster=h100_8x8"])
    job = Request("megatron", hybrid, plan_of(hybrid, LayerStrategy(1, 64), 1))
    known = (
        set(vars(hybrid.training)) if "packing" in section else set(_settings(job, job.uniform()))
    )
    assert names <= known


@pytest.mark.parametrize(("domain", "backend"), [("null", "deepep"), (8, "hybridep")])
def test_the_flex_dispatcher_takes_the_backend_of_the_nvlink_domain(
    domain: object, backend: str
) -> None:
    wide = f"cluster.nvlink_domain_gpus={domain}"
    flex = load_problem([*MIXTURE, wide, "training.moe_token_dispatcher_type=flex"])
    exported = export_plan(flex, plan_of(flex, LayerStrategy(1, 8, 1, ep=4), 2), "megatron")
    assert flags_of(exported.files["megatron.sh"])["moe-flex-dispatcher-backend"] == backend


@pytest.mark.parametrize(
    ("precision", "bits", "flag"),
    [
        ("bf16", 32, "accumulate-allreduce-grads-in-fp32"),
        ("bf16", 16, "grad-reduce-in-bf16"),
        ("fp16", 16, None),
    ],
)
def test_the_precision_of_summed_gradients_is_a_flag(
    precision: str, bits: int, flag: str | None
) -> None:
    peak = "+cluster.devices.toy.peak_TFLOPs.fp16=50"
    job = [f"training.precision={precision}", f"training.gradient_bits={bits}", peak]
    problem = load_problem([*LLAMA, *job])
    exported = export_plan(problem, plan_of(problem, LayerStrategy(1, 8, 1), 2), "megatron")
    known = {"accumulate-allreduce-grads-in-fp32", "grad-reduce-in-bf16"}
    assert known & flags_of(exported.files["megatron.sh"]).keys() == {flag} - {None}
