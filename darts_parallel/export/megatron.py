"""Megatron-LM: a launch script with its flags (`megatron/training/arguments.py` names them).

Uneven stages go into `--pipeline-model-parallel-layout` (E embedding, t layer, L head and loss, `|`
between chunks, chunk `vpp_rank * pp + pp_rank` in order of layers), which excludes
`--num-layers-per-virtual-pipeline-stage` and `--num-virtual-stages-per-pipeline-rank`.
"""

from darts_parallel.config import DYNAMIC, PADDED, ModelConfig, TrainingConfig, module_data
from darts_parallel.errors import Entries
from darts_parallel.export.common import (
    INSTALLED,
    ChunkContent,
    Exported,
    Flag,
    Flags,
    Request,
    written,
)
from darts_parallel.export.megatron_layers import (
    check_stacks,
    require_first_recomputed,
    segments,
    with_halves,
)
from darts_parallel.export.mixtures import expert_settings, megatron_recompute_modules
from darts_parallel.plans import LayerStrategy, megatron_schedule
from darts_parallel.problem import VOCABULARY_MULTIPLE

LAUNCH = """
torchrun --nnodes {nodes} --nproc-per-node {processes} --node-rank "${{NODE_RANK:-0}}" \\
    --master-addr "${{MASTER_ADDR:-localhost}}" --master-port "${{MASTER_PORT:-29500}}" \\
    "${{MEGATRON:-.}}/{program}" {arguments} "$@"
"""
FLAGS: dict[str, dict[str, Entries]] = module_data(__file__)
"""Flags with the settings under which the script has them, in the order of the script."""


def export(job: Request) -> Exported:
    """Write the launch script `megatron.sh`.

    Errors:
        UnsupportedError: Megatron-LM has no flags for it.
    """
    if job.half_blocks:
        job = with_halves(job)
    strategy = job.uniform()
    check_stacks(job)
    known = _settings(job, strategy)
    groups = {"parallelism": written(FLAGS["parallelism"], known)}
    groups["recomputation"] = _recompute_flags(job)
    groups["model"] = written(FLAGS["model"], known)
    if job.model.num_experts:
        groups["model"] += written(FLAGS["experts"], known)
    groups["model"] += written(FLAGS["more_of_the_model"], known)
    groups["training"] = written(FLAGS["training"], known)
    groups["packing"] = _packing_flags(job)
    job.settle()
    notes = _notes(job)
    changes = megatron_schedule(job.phases, job.training.seq_len) is not None
    if changes:
        notes.append(
            "the batch size changes by --step-batch-size-schedule (from 0.18 on): give --train-samples, "
            "since --train-iters counts one micro-batch a replica in learning rates and data"
        )
    if groups["packing"]:
        notes.append(
            "packing wants TransformerEngine 2.9 and data that are single sequences: --use-varlen-dataset in "
            "branch dev, --sft in others; the script is for the first of these versions"
        )
        versions = packing_flags(job.training, job.plan.pp)
        notes += [f"flags of {version}: {flags}" for version, flags in versions.items()]
        if job.training.dynamic_context_parallel_sizes == "any":
            notes.append("groups of any size want PR 6801, which takes the same flags")
    filled = {name: flags for name, flags in groups.items() if flags}
    return Exported({"megatron.sh": _script(job, strategy, filled)}, tuple(notes), changes)


def _settings(job: Request, strategy: LayerStrategy) -> Entries:
    """Return the settings that the flags name."""
    config = job.model
    training = job.training
    plan = job.plan
    precision = training.precision
    known = job.facts(strategy) | vars(config) | vars(training)
    experts = job.experts
    known["has_experts"] = experts is not None
    if experts is not None:
        known |= {"ep": experts.ep, "etp": experts.etp}
    known["inside_nodes"] = plan.inside_nodes
    known["groups"] = strategy.dp * plan.cp // job.sharded_over(strategy)
    known["micro_batch_size"] = job.micro_batch_size(strategy)
    known["batch_schedule"] = megatron_schedule(job.phases, training.seq_len)
    known["stages"] = _stages(job)
    known["sums_in_fp32"] = job.problem.software.summed_bits(precision) == 32
    keys = ("precision", "optimizer", "attention_kernel", "loss", "cuda_graphs")
    known["words"] = {key: job.word(key) for key in keys}
    known["vocabulary_multiple"] = VOCABULARY_MULTIPLE
    known["mlp_width"] = config.mlp_width
    known["positions"] = _positions(job)
    known["grouped_heads"] = config.num_kv_heads not in (None, config.num_heads)
    known["other_keys"] = (config.sliding_window or 1) - 1
    known["window_pattern"] = str(config.sliding_window_pattern or "").replace(" ", "")
    if config.hybrid_override_pattern is not None:
        known["segments"] = segments(job)
    return known | expert_settings(job)


def _positions(job: Request) -> str:
    """Return the kind of positions; the published hybrids have none: their state spaces know the order."""
    config = job.model
    if config.learned_positions:
        return "learned_absolute"
    if config.relative_position_buckets:
        return "relative"
    hybrid = config.hybrid_override_pattern is not None and not job.half_blocks
    return "none" if hybrid else "rope"


def _packing_flags(job: Request) -> Flags:
    """Return the flags of sequence packing and dynamic context parallelism."""
    training = job.problem.training
    scheduler = training.sequence_packing_scheduler
    if scheduler in (None, PADDED):
        return []
    if training.max_seqlen_per_dp_cp_rank is None:
        raise job.refuse(
            f"training.sequence_packing_scheduler={scheduler} without max_seqlen_per_dp_cp_rank",
            f"training.max_seqlen_per_dp_cp_rank={training.seq_len}",
        )
    return written(FLAGS["packing"], vars(training))


def packing_flags(training: TrainingConfig, pp: int) -> dict[str, str]:
    """Return the flags of sequence packing by version of Megatron-LM; none where nothing is packed.

    Released versions call dynamic context parallelism hybrid, for one stage only. Their scheduler forms
    other groups, and has no smallest one.
    """
    if training.sequence_packing_scheduler in (None, PADDED):
        return {}
    names = {"packing": "dev d48bd6be, PR 5123, PR 5679, PR 5811"}
    if training.sequence_packing_scheduler == DYNAMIC and pp == 1:
        names["hybrid_packing"] = (
            "0.16 to 0.19, main d98e8a64, PR 2054, PR 2282 (another scheduler)"
        )
    found = {}
    for table, name in names.items():
        flags = written(FLAGS[table], vars(training))
        found[name] = " ".join(_line(flag).strip() for flag in flags)
    return found


def _notes(job: Request) -> list[str]:
    """List the parts of the model that the flags leave out, since the plan does not know them either."""
    config = job.model
    notes = [
        "data, tokenizer, learning rate and checkpoints are yours: bash megatron.sh --data-path ...",
    ]
    if config.num_encoder_layers:
        notes.append(
            "T5's data want --vocab-extra-ids 100 and --tokenizer-type BertWordPieceCase; decoder sequences "
            "are as long as the encoder's, as the plan counts them"
        )
    if config.norm_epsilon is None:
        notes.append("model.norm_epsilon is not given: --norm-epsilon is 1e-5 there")
    hybrid = config.hybrid_override_pattern is not None and not job.half_blocks
    if not config.gated_mlp:
        notes.append("the activation of the MLP is written as GELU: --squared-relu for Nemotron")
    elif config.num_encoder_layers:
        notes.append("the gate of the MLP is written as SiLU; T5 v1.1 has GELU, which has no flag")
    tables = config.learned_positions or config.relative_position_buckets
    if not tables and not hybrid:
        notes.append(
            "positions are written as rotary in all layers, over whole heads, without scaling: "
            "--no-rope-freq, --rotary-percent, --use-rope-scaling"
        )
        if config.rotary_base is None:
            notes.append("model.rotary_base is not given: --rotary-base is 10000 there")
    return notes


def _script(job: Request, strategy: LayerStrategy, groups: dict[str, Flags]) -> str:
    program = _program(job.model)
    nodes, gpus = job.nodes
    lines = [
        "#!/usr/bin/env bash",
        job.headline(),
        "# MEGATRON: folder of Megatron-LM; NODE_RANK, MASTER_ADDR, MASTER_PORT: of this node.",
        "set -eu",
    ]
    package = INSTALLED.get(job.training.attention_kernel or "")
    if package is not None:
        lines.append(f'python -c "import {package}"  # training.attention_kernel wants it')
    if "/" in program:  # it imports from the folder of Megatron-LM
        lines.append('export PYTHONPATH="${MEGATRON:-.}${PYTHONPATH:+:$PYTHONPATH}"')
    # one queue orders tensor-parallel collectives before the kernels that wait; FSDP needs several
    if strategy.zero_stage < 2:
        lines.append("export CUDA_DEVICE_MAX_CONNECTIONS=1")
    for name, flags in groups.items():
        lines += ["", f"{name}=(", *(_line(flag) for flag in flags), ")"]
    processes = '"${GPUS_PER_NODE:?GPUs of this node}"' if gpus is None else str(gpus)
    arguments = " ".join(f'"${{{name}[@]}}"' for name in groups)
    lines.append(
        LAUNCH.format(nodes=nodes, processes=processes, program=program, arguments=arguments)
    )
    return "\n".join(lines)


def _program(model: ModelConfig) -> str:
    """Return the program that trains a model; those of BERT and T5 moved to the examples in 2026-05."""
    if model.num_encoder_layers:
        return "examples/t5/pretrain_t5.py"
    if not model.causal:
        return "examples/bert/pretrain_bert.py"
    if model.hybrid_override_pattern is not None:
        return "pretrain_hybrid.py"
    return "pretrain_gpt.py"


def _line(flag: Flag) -> str:
    """Write a flag, with quotes around what a shell would expand."""
    name, value = flag
    if value is None:
        return f"    --{name}"
    text = str(value)
    if any(sign in text for sign in "|*[:"):
        text = f'"{text}"'
    return f"    --{name} {text}"


def _stages(job: Request) -> str:
    """Return the flag that cuts the layers into stages; empty where nothing needs it."""
    plan = job.plan
    if plan.virtual_stages > 1 and plan.num_micro_batches % plan.pp:
        job.refuse(
            f"num_micro_batches={plan.num_micro_batches} is no multiple of pp={plan.pp}, which its "
            "interleaved schedule wants",
            "space.virtual_stages=1",
        )
    if plan.num_chunks == 1 or job.model.hybrid_override_pattern is not None:
        return ""
    if not job.even:
        return f"--pipeline-model-parallel-layout {layout(job.chunks)}"
    if plan.virtual_stages > 1:
        return f"--num-virtual-stages-per-pipeline-rank {plan.virtual_stages}"
    return ""


def layout(chunks: tuple[ChunkContent, ...]) -> str:
    """Return the stages in Megatron-LM's words, e.g. `Et*3|t*4|t*2L`."""
    texts = []
    for chunk in chunks:
        blocks = "t" if chunk.num_blocks == 1 else f"t*{chunk.num_blocks}"
        if not chunk.num_blocks:
            blocks = ""
        texts.append("E" * chunk.embedding + blocks + "m" * chunk.mtp + "L" * chunk.head)
    return "|".join(texts)


def _recompute_flags(job: Request) -> Flags:
    """Count the recomputed layers of every chunk; blocks are equal, so that counts suffice."""
    kinds = {strategy.recompute for strategy in job.blocks}
    if kinds == {"none"}:
        return []
    if kinds == {"selective"}:
        return [("recompute-granularity", "selective"), *megatron_recompute_modules(job)]
    if "selective" in kinds:
        job.refuse("recompute=selective for some blocks only, and its granularity is one for all")
    full = ("recompute-granularity", "full")
    if kinds == {"full"}:  # of half blocks two share one kept input, as the plan counts
        layers = 2 if job.half_blocks else 1
        return [full, ("recompute-method", "uniform"), ("recompute-num-layers", layers)]
    if job.half_blocks:
        job.refuse("recompute=full for some half blocks only, of which each would keep its input")
    if job.model.num_encoder_layers:
        job.refuse(
            "recompute=full for some blocks only, and --recompute-num-layers counts the encoder's and the "
            "decoder's each"
        )
    require_first_recomputed(job)
    blocks = [job.blocks_of(chunk) for chunk in job.chunks]
    counts = [sum(own.recompute == "full" for own in of_chunk) for of_chunk in blocks]
    most = max(counts)
    if counts != [min(most, chunk.num_blocks) for chunk in job.chunks]:
        job.refuse(
            f"recompute=full for {counts} blocks by stage, and --recompute-num-layers is one for all"
        )
    return [full, ("recompute-method", "block"), ("recompute-num-layers", most)]
