"""Measured runs are read by stated rules; a bad row is reported and never costs a good one."""

import csv
import re
from pathlib import Path

import pytest
import torch

from darts_parallel.errors import ConfigError
from darts_parallel.problem.software import CONTEXT_GIB, read_software
from experiments.calibration.calibrated import QUANTITIES, Calibrated, Parameters, Place
from experiments.calibration.predict import predict, reserved_bytes, with_parameters
from experiments.calibration.problems import MeasuredCase, build_case
from experiments.calibration.report import predict_runs
from experiments.data import normalize
from experiments.data.normalize import NormalizeOptions, read_folder
from experiments.data.runs import ALTERNATE, SHIPPED, MeasuredRun, read_runs, write_runs
from experiments.data.table import RowError, TableRow
from experiments.validate_cost_model import ValidationOptions, validate
from tests.support import measured_files
from tests.support.measured_files import RUN, cases_of, write_rows


def run_of(**cells: str) -> MeasuredRun:
    return measured_files.run_of(TableRow("a.csv", 2, {**RUN, **cells}))


BAD = [
    ({"iteration_s": "-1.5"}, "iteration_s=-1.5 must be above 0"),
    ({"iteration_s": "nan"}, "iteration_s=nan must be a finite number"),
    ({"n_gpus": "16"}, "dp(4) * tp(2) * pp(1) * cp(1) = 8 is not n_gpus=16"),
    ({"gpu": "abacus"}, "gpu=abacus is unknown"),
    ({"layers": ""}, "layers is missing"),
    ({"global_batch": "33"}, "global_batch=33 is not a multiple of dp=4"),
    ({"micro_batch": "3"}, "is not global_batch=32"),
    ({"iteration_s": "", "memory_gb": ""}, "no seconds or memory measured"),
    ({"model": "Unheard-8x9B"}, "mixture of experts whose sizes"),
    ({"notes": "ANOMALOUS: paused"}, "flagged in the notes"),
    ({"precision": "fp8"}, "training.precision=fp8"),
    ({"heads": "9"}, "model.num_heads=9"),
]


def test_bad_rows_are_reported_with_file_line_and_reason_and_the_rest_is_used(
    tmp_path: Path,
) -> None:
    write_rows(tmp_path / "a.csv", [{}, *(cells for cells, _ in BAD), {}])
    outcomes = predict_runs(read_folder(str(tmp_path))[0], Calibrated.read())
    assert not outcomes[0].skipped
    assert not outcomes[-1].skipped
    assert outcomes[0].predicted_iteration_s == outcomes[-1].predicted_iteration_s
    for outcome, (_, reason), line in zip(outcomes[1:-1], BAD, range(3, 99), strict=False):
        assert (outcome.file, outcome.row) == ("a.csv", line)
        assert reason in outcome.skipped


def test_broken_lines_cost_only_themselves(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.csv", [{}, {"notes": "two\nlines"}, {}])
    lines = (tmp_path / "a.csv").read_text().splitlines()
    middle = ['"an open quote,1,2', "too,few,cells", ""]
    (tmp_path / "a.csv").write_text("\n".join([*lines[:2], *middle, *lines[2:]]) + "\n")
    (tmp_path / "b.csv").write_bytes(b"")
    (tmp_path / "c.csv").write_text("colour,weight\nred,3\n")
    (tmp_path / "d.csv").write_bytes(b"\xff\xfe\x00bin\x00ary\n\x81")
    runs, others = read_folder(str(tmp_path))
    reasons = {run.row: run.skipped for run in runs}
    assert reasons == {2: "", 3: reasons[3], 4: "3 cells, but the header has 37", 6: "", 8: ""}
    assert "quote" in reasons[3] or "cells" in reasons[3]
    assert [name for name, _ in others] == ["b.csv", "c.csv", "d.csv"]


def test_validation_writes_one_line_a_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data"
    out = tmp_path / "out"
    data.mkdir()
    write_rows(
        data / "a.csv",
        [{"memory_gb": "20"}, {"iteration_s": "-1"}, {"micro_batch": "8", "dp": "4"}],
    )
    write_rows(data / "b.csv", [{"hidden": "65536", "ffn": "", "iteration_s": "", "oom": "yes"}])
    assert validate(ValidationOptions(data=str(data), out=str(out))) == 0
    with (out / "validation.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert [r["file"] + r["row"] for r in rows] == ["a.csv2", "a.csv3", "a.csv4", "b.csv2"]
    assert [bool(r["skipped"]) for r in rows] == [False, True, True, False]
    assert float(rows[0]["measured_iteration_s"]) == 0.5
    assert float(rows[0]["predicted_memory_gb"]) > 0
    assert [r["fits"] for r in rows] == ["True", "", "", "False"]
    assert not rows[1]["predicted_iteration_s"]
    printed = capsys.readouterr().out
    assert "a.csv:3: iteration_s=-1 must be above 0" in printed
    assert "2 of 4 rows used" in printed


def test_validation_ranks_the_plans_of_a_job(tmp_path: Path) -> None:
    """The second of four measured plans is the fastest; the smallest degrees take 25 % longer."""
    data = tmp_path / "data"
    data.mkdir()
    plans = [("1", "8"), ("2", "4"), ("4", "2"), ("8", "1")]
    seconds = ["0.5", "0.4", "0.6", "0.8"]
    rows = [
        {"tp": tp, "dp": dp, "micro_batch": tp, "iteration_s": own}
        for (tp, dp), own in zip(plans, seconds, strict=True)
    ]
    write_rows(data / "a.csv", rows)
    assert validate(ValidationOptions(data=str(data), out=str(tmp_path))) == 0
    with (tmp_path / "ranking.csv").open() as stream:
        (job,) = csv.DictReader(stream)
    assert (job["plans"], float(job["chance_regret_1"])) == ("4", pytest.approx(0.4375))
    assert float(job["smallest_regret_1"]) == pytest.approx(0.25)
    assert float(job["regret_3"]) <= float(job["regret_1"]) <= 1.0
    assert -1.0 <= float(job["spearman"]) <= 1.0


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("~250k", 250_000),
        ("2048.0", 2048),
        ("512?", 512),
        ("4096 (assumed)", 4096),
        ("not stated", None),
        (">1 (not stated)", None),
        ("", None),
        ("1,024", 1024),
        ("3.57B (vocab 131072)", 3_570_000_000),
    ],
)
def test_a_number_is_what_a_cell_begins_with(text: str, value: int | None) -> None:
    assert TableRow("a.csv", 2, {"vocab": text}).count("vocab") == value


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        ({"zero": "3 (FSDP2)"}, {"zero_stage": 3, "shard_size": 0}),
        (
            {"source": "torchtitan", "zero": "3", "tp": "1", "pp": "2", "layers": "24"},
            {"zero_stage": 1},
        ),
        ({"zero": "1 (shard group 2)"}, {"zero_stage": 1, "shard_size": 2}),
        ({"zero": "1 (shard group 4)"}, {"zero_stage": 1, "shard_size": 0}),
        ({"recompute": "selective (op)"}, {"recompute": ALTERNATE}),
        ({"recompute": "selective"}, {"recompute": "selective"}),
        ({"precision": "float8 rowwise"}, {"precision": "fp8"}),
        ({"sequence_parallel": ""}, {"sequence_parallel": True}),
        (
            {"sequence_parallel": "", "source": "arXiv 2104.04473 (Megatron-LM)"},
            {"sequence_parallel": False},
        ),
        ({"micro_batch": "", "num_microbatches": ""}, {"num_micro_batches": 8}),
        ({"micro_batch": ""}, {"num_micro_batches": 4}),
        ({"global_batch": ""}, {"global_batch_size": 32}),
        ({"heads": ""}, {"num_heads": 8}),
        ({"iteration_s": "", "tokens_per_s_per_gpu": "8192"}, {"iteration_s": 0.5}),
        ({"iteration_s": "", "samples_per_s": "64"}, {"iteration_s": 0.5}),
        (
            {
                "pp": "4",
                "tp": "1",
                "dp": "2",
                "global_batch": "16",
                "layers": "24",
                "vpp_chunks": ">1",
            },
            {"virtual_stages": 2},
        ),
    ],
)
def test_what_a_row_leaves_out_follows_the_stated_rules(
    cells: dict[str, str], expected: dict[str, object]
) -> None:
    run = run_of(**cells)
    assert {name: getattr(run, name) for name in expected} == expected


def test_missing_sizes_are_those_that_the_other_rows_state_most_often() -> None:
    rows = [
        TableRow("a.csv", 2 + i, {**RUN, "heads": h, "vocab": v})
        for i, (h, v) in enumerate([("16", "50k"), ("16", "50k"), ("4", "32000"), ("", "")])
    ]
    run = measured_files.run_of(rows[-1], rows)
    assert (run.num_heads, run.vocab_size) == (16, 50_000)


@pytest.mark.parametrize(
    ("cells", "edges"),
    [
        ({}, (0, 3, 5, 7, 11)),
        ({"layers": "10"}, (0, 3, 6, 9, 13)),  # embedding and head as layers of 12
        ({"layers": "10", "notes": "partition by type:transformer|embedding"}, (0, 3, 6, 9, 13)),
        ({"notes": "layers per stage 5 2 2 5 (of 14 entries)"}, (0, 3, 5, 7, 11)),
    ],
)
def test_stages_are_equal_or_as_the_notes_print_them(
    cells: dict[str, str], edges: tuple[int, ...]
) -> None:
    base = {"layers": "8", "pp": "4", "tp": "1", "dp": "2", "global_batch": "16"}
    assert build_case(run_of(**{**base, **cells})).plan.boundaries == edges


@pytest.mark.parametrize(
    ("cells", "device", "bandwidth"),
    [
        ({"gpu": "H100-96GB HBM2e 2.4TB/s, 500W"}, "h100_hbm2e", 400.0),
        ({"gpu": "a100_40gb", "source": "x (1600 Gbps node-node interconnect)"}, "a100_40", 200.0),
        ({"notes": "inter-node 4x100Gb RoCE"}, "a100_80", 50.0),
        ({"gpu": "H200-SXM", "notes": "400Gb/s per GPU"}, "h200", 400.0),
        ({"gpu": "GB200 NVL72"}, "gb200", 200.0),
        ({"gpu": "L40S"}, "l40s", 25.0),
        ({"gpu": "NVIDIA L4"}, "l4", 12.5),
        ({"gpu": "GeForce RTX 4090"}, "rtx4090", 1.25),
        ({"gpu": "RTX A6000"}, "a6000", 12.5),
        ({"gpu": "RTX PRO 6000 Blackwell"}, "rtx_pro_6000", 25.0),
    ],
)
def test_hardware_follows_the_words_of_the_row(
    cells: dict[str, str], device: str, bandwidth: float
) -> None:
    run = run_of(**cells)
    assert (run.devices, run.inter_GBps) == ((device,), (pytest.approx(bandwidth),))


def test_a_missing_folder_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must be a folder"):
        read_folder(str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="must hold a CSV file"):
        read_folder(str(tmp_path))


def test_a_run_becomes_the_plan_that_its_row_describes(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.csv", [{"zero": "3", "recompute": "selective (op)"}])
    [case] = cases_of(tmp_path)
    blocks = case.plan.layers[1:-2]
    assert [layer.recompute for layer in blocks] == ["none", "full"] * 2
    assert {(layer.tp, layer.dp, layer.zero_stage) for layer in case.plan.layers} == {(2, 4, 3)}
    assert case.problem.training.global_batch_size == 32


@pytest.mark.parametrize(
    ("gpu", "kinds"),
    [
        ("12 V100-16GB + 4 T4-16GB", [("v100_16", 3), ("t4", 1)]),
        ("3 nodes of 4 V100-16GB and 1 node of 4 T4", [("v100_16", 3), ("t4", 1)]),
        ("T4-16GB (AWS g4dn.12xlarge)", [("t4", 4)]),
    ],
)
def test_nodes_of_several_kinds_are_groups_of_their_own(
    gpu: str, kinds: list[tuple[str, int]]
) -> None:
    run = run_of(gpu=gpu, gpus_per_node="4", n_gpus="16", dp="4", tp="2", pp="2", precision="fp16")
    groups = build_case(run).problem.cluster.groups
    assert [(group.device.name, group.count) for group in groups] == kinds


def test_a_slow_ethernet_is_filled_and_a_fast_one_is_not() -> None:
    shares = {"inter_efficiency": torch.tensor(0.25)}
    rates = []
    for rate in (10, 50, 100):
        case = build_case(run_of(notes=f"inter-node {rate} Gbit/s"))
        rates.append(float(with_parameters(case, shares).inter_node.bandwidth) / 1e9)
    assert rates == pytest.approx([0.9 * 1.25, 0.25 * 6.25, 0.25 * 12.5])


def test_racks_are_one_domain_and_narrow_precisions_keep_their_names() -> None:
    for gpu, precision in (("GB200", "MXFP8"), ("GB300", "NVFP4")):
        run = run_of(gpu=gpu, gpus_per_node="4", precision=precision)
        case = build_case(run)
        assert run.precision == precision.lower()
        assert case.problem.cluster.one_domain
        assert len(case.problem.cluster.node_types) == 2


def test_states_in_the_cpus_memory_take_longer_and_context_ranks_share_them() -> None:
    without = build_case(run_of(notes="cpu offload=False; Opt Offl=N"))
    assert without.plan.offload == ()
    for notes in ("ScatEmb=Y; full CPU offload", "Opt Offl=Y; Par Offl=N", "cpu offload=True; x"):
        case = build_case(run_of(notes=notes))
        assert case.plan.offload == ((0.0, 1.0),) * case.plan.pp
        found, before = (predict(c, {}) for c in (case, without))
        assert float(found.seconds) > float(before.seconds)
        assert float(found.memory) < float(before.memory)


def test_rows_of_adapters_are_priced_with_frozen_weights() -> None:
    case = build_case(run_of(model="Llama3-8B LoRA"))
    whole = build_case(run_of(model="Llama3-8B"))
    assert case.problem.training.lora_rank == 16
    assert case.problem.training.lora_targets == ["linear_qkv"]
    assert float(predict(case, {}).seconds) < float(predict(whole, {}).seconds)
    with pytest.raises(RowError, match="other than LoRA"):
        run_of(notes="QLoRA")


def test_what_the_allocator_counts_is_not_what_a_device_loses() -> None:
    shown, counted = (
        build_case(run_of(memory_gb="40", notes=notes))
        for notes in ("", "memory GiB, max allocated")
    )
    assert (shown.run.memory_metric, counted.run.memory_metric) == ("device", "allocated")
    reserved = {"reserved_GiB": torch.tensor(3.0)}
    difference = predict(shown, reserved).memory - predict(counted, reserved).memory
    assert float(difference) == pytest.approx(3.0 * 2**30)
    # a smaller GPU has less room for what the allocator keeps
    small = float(reserved_bytes(torch.tensor(3.0), 20.0 * 2**30))
    assert small == pytest.approx((CONTEXT_GIB + (3.0 - CONTEXT_GIB) / 4.0) * 2**30)
    quantity = next(q for q in QUANTITIES if q.name == "reserved_GiB")
    assert quantity.above == CONTEXT_GIB
    parameters = Parameters([Place.of_run(case.run) for case in (shown, counted)])
    metrics = {key[2] for key in parameters.keys if key[1] == "memory_metric"}
    assert metrics == {"device", "allocated"}
    assert run_of(memory_gb="40", notes="TRL, chunked loss").memory_GiB is None


@pytest.mark.parametrize(
    ("cells", "name"),
    [
        ({"source": "github NVIDIA/Megatron-LM images/x.png"}, "megatron_2021"),
        ({"source": "dgxc-benchmarking maxtext/README"}, "jax"),
        ({"source": "dgxc-benchmarking llama3.1/README"}, "nemo"),
        ({"source": "bigscience gpt2.md L1 (Megatron + Deepspeed ZeRO (old branch))"}, "deepspeed"),
        ({"source": "bigscience gpt2.md L1 (HF + Deepspeed Zero 3)"}, "deepspeed_hf"),
        ({"source": "somebody"}, "default"),
    ],
)
def test_a_framework_is_recognised_by_its_words(cells: dict[str, str], name: str) -> None:
    assert run_of(**cells).framework == name


def test_runs_are_written_and_read_as_they_are(tmp_path: Path) -> None:
    several = dict(
        gpu="12 V100-16GB + 4 T4", gpus_per_node="4", n_gpus="16", dp="8", global_batch="64"
    )
    staged = dict(pp="2", dp="2", num_microbatches="8", memory_gb="11.5")
    write_rows(tmp_path / "a.csv", [{}, several | {"source": "AMP"}, {"layers": ""}, staged])
    out = tmp_path / "out" / "runs.csv"
    out.parent.mkdir()
    assert normalize.normalize(NormalizeOptions(data=str(tmp_path), out=str(out))) == 0
    runs = read_folder(str(tmp_path))[0]
    assert [bool(run.skipped) for run in runs] == [False, False, True, False]
    assert read_runs(out) == runs
    assert (runs[1].nodes, runs[1].intra_GBps) == ((3, 1), (21.25, 15.75))  # of its instances


@pytest.mark.parametrize("switch", ["tp_comm_overlap", "compiled"])
def test_a_framework_is_priced_with_the_switches_that_all_its_runs_have(switch: str) -> None:
    values: dict[str, set[bool]] = {}
    for run in read_runs():
        if not run.skipped and getattr(run, switch) is not None:
            values.setdefault(run.framework, set()).add(getattr(run, switch))
    alike = {name: own for name, own in values.items() if len(own) == 1}
    assert len(alike) > 5
    for name, own in alike.items():
        assert {read_software(name).runs.get(switch)} == own, name


def test_the_shipped_runs_are_whole_and_have_sources() -> None:
    runs = read_runs()
    assert len(runs) > 900
    assert write_runs(runs) == SHIPPED.read_text(encoding="utf-8")
    assert all(run.source for run in runs)
    used = [run for run in runs if not run.skipped]
    assert all(run.iteration_s or run.memory_GiB or run.out_of_memory for run in used)
    for run in used[::40]:
        assert isinstance(build_case(run), MeasuredCase)


def test_a_run_whose_recomputation_is_not_printed_is_refused_where_full_does_not_fit(
    tmp_path: Path,
) -> None:
    large = {
        "layers": "84",
        "hidden": "4096",
        "micro_batch": "8",
        "num_microbatches": "1",
        "tp": "8",
        "dp": "1",
        "global_batch": "8",
        "seq_len": "8192",
    }
    rows = [
        large | told
        for told in (
            {},
            {"recompute": "full"},
            {"recompute": "not stated"},
            {"recompute": "not stated", "layers": "240"},
        )
    ]
    write_rows(tmp_path / "a.csv", rows)
    outcomes = predict_runs(read_folder(str(tmp_path))[0], Calibrated.read())
    assert [outcome.fits for outcome in outcomes] == [False, True, True, False]
    assert outcomes[2].predicted_memory_gb == outcomes[0].predicted_memory_gb
    assert outcomes[2].predicted_iteration_s == outcomes[0].predicted_iteration_s


def test_what_measured_releases_alone_did_is_no_habit_of_todays_plans() -> None:
    assert build_case(run_of(source="nanotron")).problem.software.gathered_inputs
    assert not read_software("nanotron").gathered_inputs


def test_a_recipe_says_what_a_plan_recomputes_and_shards_and_what_ran_without_deepspeed() -> None:
    maxtext = run_of(
        source="github NVIDIA/dgxc-benchmarking maxtext/README_70b.md @v24.11.1", notes="JAX"
    )
    assert maxtext.recompute == "selective"
    assert maxtext.recompute_modules == ("core_attn", "layernorm", "mlp")
    pax = "NVIDIA/JAX-Toolbox @ddf1b9914e7b^ rosetta/projects/pax/README.md paxml"
    assert run_of(source=pax, model="GPT3-175B").recompute == "full"
    assert run_of(source=pax, model="GPT3-126M").attention_kernel == "unfused"
    node = run_of(
        source="github NVIDIA/dgxc-benchmarking paxml/README.md @v24.11.1",
        model="GPT-5B",
        zero="3 (FSDP ? + DP)",
        tp="1",
        dp="32",
        n_gpus="32",
        global_batch="256",
    )
    assert (node.zero_stage, node.shard_size, node.dropout, node.gradient_bits) == (3, 8, False, 16)
    assert (maxtext.shard_size, maxtext.gradient_bits) == (0, 16)
    trainer = "HF Trainer, FlashAttention 2, torch 2.0"
    qwen = {"source": "QwenLM/Qwen @2df8e8ac450f README.md hf trainer"}
    alone = run_of(model="Qwen-7B LoRA", notes=f"{trainer}; LoRA", **qwen)
    assert (alone.framework, alone.zero_stage) == ("hf", 1)
    sharded = run_of(model="Qwen-72B LoRA", notes=f"{trainer}; LoRA; DeepSpeed ZeRO-3", **qwen)
    assert sharded.framework == "deepspeed_hf"
    whole = run_of(model="Qwen-1.8B", notes=trainer, zero="0", memory_gb="43.5", **qwen)
    assert (whole.framework, whole.zero_stage) == ("deepspeed_hf", 3)
    # GB are 10^9 bytes there, and the head is a table of its own
    assert whole.memory_GiB == pytest.approx(43.5e9 / 2**30)
    assert not whole.tie_embeddings


def test_switches_are_printed_or_of_a_recipe_or_unknown() -> None:
    plain = run_of(source="somebody's own runs of mcore", gpu="H100", notes="")
    assert plain.attention_kernel is None
    assert plain.compiled is None
    recipe = run_of(source="github NVIDIA/dgxc-benchmarking README.md @v25.04.01 nemo", gpu="H100")
    assert (recipe.attention_kernel, recipe.tp_comm_overlap) == ("cudnn", True)
    assert "attention_kernel=recipe" in recipe.switches_from
    told = run_of(notes="FlashAttention 2, torch.compile, async TP", gpu="H100")
    assert (told.attention_kernel, told.compiled, told.tp_comm_overlap) == ("fa2", True, True)
    assert "compiled=printed" in told.switches_from
    # a cell of the switch's own name comes first
    cells = {"attention_kernel": "fa3", "tp_comm_overlap": "0", "notes": "FlashAttention 2"}
    own = run_of(gpu="H100", **cells)
    assert (own.attention_kernel, own.tp_comm_overlap) == ("fa3", False)


ZERO_TABLE = "bigscience-workshop/bigscience gpt2.md @9e64edec L{} (Megatron + Deepspeed ZeRO)"


@pytest.mark.parametrize(
    ("line", "notes", "in_host", "divided"),
    [
        (371, "", True, True),
        (433, "", False, True),
        (445, "PA_CPU=N", False, True),
        (446, "PA_CPU=Y", True, True),
    ],
)
def test_inputs_of_recomputed_blocks_lie_where_the_scripts_put_them(
    line: int, notes: str, in_host: bool, divided: bool
) -> None:
    run = run_of(source=ZERO_TABLE.format(line), notes=notes, gpu="V100", recompute="full")
    assert (run.cpu_checkpointing, run.partition_activations) == (in_host, divided)
    assert run.host_GiB == 37.25
    other = run_of(source="somebody's DeepSpeed ZeRO-3", recompute="full")
    assert (other.cpu_checkpointing, other.partition_activations) == (False, False)


def test_host_memory_bounds_what_is_offloaded() -> None:
    # 20 sequences ran, 22 were killed (BigScience's gpt2.md, lines 420 and 421)
    fits = {
        case.run.global_batch_size: predict(case, Calibrated.read().at(Place.of_run(case.run))).fits
        for case in map(
            build_case, (run for run in read_runs() if re.search("L42[01] ", run.source))
        )
    }
    assert fits == {1280: True, 1408: False}


def test_moments_of_16_bits_are_read_from_the_row() -> None:
    assert run_of(zero="1, bf16 optimizer states").optimizer == "adam_bf16_moments"
    assert run_of(zero="1").optimizer == "adam"


def test_adapters_are_those_of_the_recipe() -> None:
    source = "mlcommons/training_results_v4.0 Dell nemo"
    run = run_of(model="Llama2-70B LoRA", source=source, gpu="H100", precision="fp8", notes="")
    assert (run.lora_rank, run.lora_dropout, run.frozen_bits) == (16, 0.1, 8)
    assert run.lora_targets == ("linear_qkv", "linear_proj")
    assert run_of(model="Llama2-70B LoRA", notes="LoRA rank 8").lora_rank == 8


def test_at_least_twelve_houses_are_told_apart() -> None:
    houses = {run.house for run in read_runs() if not run.skipped}
    assert len(houses) >= 12
    assert "MLPerf submitters x NeMo" in houses


def test_runs_in_8_bits_under_zero_3_that_ran_are_not_refused() -> None:
    """Frameworks that keep narrow copies of gathered weights could not have run these."""
    narrow = ("fp8", "mxfp8", "nvfp4")
    runs = [run for run in read_runs() if not run.skipped and run.zero_stage == 3]
    own = [run for run in runs if run.precision in narrow and not run.out_of_memory]
    assert len(own) == 39
    assert {"jax", "nemo", "torchtitan_compile"} <= {run.framework for run in own}
    refused = [(o.file, o.row) for o in predict_runs(own, Calibrated.read()) if not o.fits]
    assert not refused
