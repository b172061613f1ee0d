"""Megatron-LM: a launch script with its flags (`megatron/training/arguments.py` names them).

Uneven stages go into `--pipeline-model-parallel-layout` (E embedding, t layer, L head and loss, `|`
between chunks, chunk `vpp_rank * pp + pp_rank` in order of layers), which excludes
`--num-layers-per-virtual-pipeline-stage` and `--num-virtual-stages-per-pipeline-rank`.
"""

from darts_parallel.config import DYNAMIC, PADDED, ModelConfig, TrainingConfig
from darts_parallel.export.common import (
    INSTALLED,
    ChunkContent,
    Exported,
    Flag,
    Flags,
    Request,
    flags_of,
    read_flags,
    switches,
)
from darts_parallel.export.megatron_layers import (
    hybrid_flags,
    prediction_flags,
    require_first_recomputed,
    stack_flags,
    window_flags,
    with_halves,
)
from darts_parallel.export.mixtures import (
    expert_flags,
    latent_flags,
    megatron_recompute_modules,
)
from darts_parallel.plans import LayerStrategy, megatron_schedule
from darts_parallel.problem import VOCABULARY_MULTIPLE

LAUNCH = """
torchrun --nnodes {nodes} --nproc-per-node {processes} --node-rank "${{NODE_RANK:-0}}" \\
    --master-addr "${{MASTER_ADDR:-localhost}}" --master-port "${{MASTER_PORT:-29500}}" \\
    "${{MEGATRON:-.}}/{program}" {arguments} "$@"
"""
PER_TOKEN = "--calculate-per-token-loss --dataloader-type single --cuda-graph-impl none"
"""Flags that all versions of packing want."""
FSDP_STRATEGY = {2: "optim_grads", 3: "optim_grads_params"}


def export(job: Request) -> Exported:
    """Write the launch script `megatron.sh`.

    Errors:
        UnsupportedError: Megatron-LM has no flags for it.
    """
    if job.half_blocks:
        job = with_halves(job)
    strategy = job.uniform()
    groups = {
        "parallelism": _parallel_flags(job, strategy),
        "recomputation": _recompute_flags(job),
        "model": _model_flags(job),
        "training": _training_flags(job),
    }
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


def _packing_flags(job: Request) -> Flags:
    """Return the flags of sequence packing and dynamic context parallelism."""
    training = job.problem.training
    scheduler = training.sequence_packing_scheduler
    if scheduler in (None, PADDED):
        return []
    budget = training.max_seqlen_per_dp_cp_rank
    if budget is None:
        raise job.refuse(
            f"training.sequence_packing_scheduler={scheduler} without max_seqlen_per_dp_cp_rank",
            f"training.max_seqlen_per_dp_cp_rank={training.seq_len}",
        )
    return _flags_of_schedulers(training)


def _flags_of_schedulers(training: TrainingConfig) -> Flags:
    """Return the flags of the versions that have `--sequence-packing-scheduler`."""
    flags = flags_of(training, "sequence_packing_scheduler max_seqlen_per_dp_cp_rank")
    flags += read_flags(PER_TOKEN)
    if training.sequence_packing_scheduler == DYNAMIC:
        flags.append(("dynamic-context-parallel", None))
        flags += flags_of(training, "min_dynamic_context_parallel_size")
    return flags


def packing_flags(training: TrainingConfig, pp: int) -> dict[str, str]:
    """Return the flags of sequence packing by version of Megatron-LM; none where nothing is packed.

    Released versions call dynamic context parallelism hybrid, for one stage only. Their scheduler forms
    other groups, and has no smallest one.
    """
    if training.sequence_packing_scheduler in (None, PADDED):
        return {}
    found = {"dev d48bd6be, PR 5123, PR 5679, PR 5811": _flags_of_schedulers(training)}
    if training.sequence_packing_scheduler == DYNAMIC and pp == 1:
        budget = flags_of(training, "max_seqlen_per_dp_cp_rank")
        hybrid = [("hybrid-context-parallel", None), *budget, *read_flags(PER_TOKEN)]
        found["0.16 to 0.19, main d98e8a64, PR 2054, PR 2282 (another scheduler)"] = hybrid
    return {name: " ".join(_line(flag).strip() for flag in flags) for name, flags in found.items()}


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


def _parallel_flags(job: Request, strategy: LayerStrategy) -> Flags:
    plan = job.plan
    flags: Flags = [
        ("tensor-model-parallel-size", strategy.tp),
        ("pipeline-model-parallel-size", plan.pp),
        ("context-parallel-size", plan.cp),
    ]
    if plan.inside_nodes:
        flags.append(("use-tp-pp-dp-mapping", None))
    if plan.cp > 1 and job.facts(strategy)["windowed_heads"]:
        flags.append(("cp-comm-type", "a2a"))
    if (experts := job.experts) is not None:  # the expert tensor-parallel degree defaults to tp
        flags += [
            ("expert-model-parallel-size", experts.ep),
            ("expert-tensor-parallel-size", experts.etp),
        ]
    if strategy.sequence_parallel:
        flags.append(("sequence-parallel", None))
        flags += flags_of(job.training, "tp_comm_overlap")
    flags += _pipeline_flags(job) + _zero_flags(job, strategy)
    flags.append(("micro-batch-size", job.micro_batch_size(strategy)))
    return [*flags, _batch_flag(job)]


def _batch_flag(job: Request) -> Flag:
    """Return the flag of the global batch size, or of its schedule, which excludes the other."""
    schedule = megatron_schedule(job.phases, job.training.seq_len)
    if schedule is None:
        return "global-batch-size", job.training.global_batch_size
    return "step-batch-size-schedule", schedule


def _pipeline_flags(job: Request) -> Flags:
    plan = job.plan
    if plan.virtual_stages > 1 and plan.num_micro_batches % plan.pp:
        job.refuse(
            f"num_micro_batches={plan.num_micro_batches} is no multiple of pp={plan.pp}, which its "
            "interleaved schedule wants",
            "space.virtual_stages=1",
        )
    if plan.num_chunks == 1 or job.model.hybrid_override_pattern is not None:
        return []
    if not job.even:
        return [("pipeline-model-parallel-layout", layout(job.chunks))]
    if plan.virtual_stages > 1:
        return [("num-virtual-stages-per-pipeline-rank", plan.virtual_stages)]
    return []


def layout(chunks: tuple[ChunkContent, ...]) -> str:
    """Return the stages in Megatron-LM's words, e.g. `Et*3|t*4|t*2L`."""
    texts = []
    for chunk in chunks:
        blocks = "t" if chunk.num_blocks == 1 else f"t*{chunk.num_blocks}"
        if not chunk.num_blocks:
            blocks = ""
        texts.append("E" * chunk.embedding + blocks + "m" * chunk.mtp + "L" * chunk.head)
    return "|".join(texts)


def _zero_flags(job: Request, strategy: LayerStrategy) -> Flags:
    zero = strategy.zero_stage
    several = strategy.dp > 1
    flags = switches(
        {
            "use-distributed-optimizer": zero > 0,
            "overlap-grad-reduce": several,
            "overlap-param-gather": several and zero > 0,
        }
    )
    groups = strategy.dp * job.plan.cp // job.sharded_over(strategy)
    if zero and groups > 1:
        flags.append(("num-distributed-optimizer-instances", groups))
    if zero > 1:
        flags += [
            ("use-megatron-fsdp", None),
            ("data-parallel-sharding-strategy", FSDP_STRATEGY[zero]),
        ]
        flags += read_flags("--no-gradient-accumulation-fusion --ckpt-format fsdp_dtensor")
    return flags


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


def _model_flags(job: Request) -> Flags:
    config = job.model
    hybrid = hybrid_flags(job)
    flags = hybrid or stack_flags(job)
    flags += [
        ("hidden-size", config.hidden_size),
        ("ffn-hidden-size", config.mlp_width),
        ("num-attention-heads", config.num_heads),
    ]
    if config.num_kv_heads not in (None, config.num_heads):
        flags += [("group-query-attention", None), ("num-query-groups", config.num_kv_heads)]
    if config.head_dim is not None:
        flags.append(("kv-channels", config.head_dim))
    # the published hybrids have no positions: their state spaces know the order
    unplaced = hybrid and not job.half_blocks
    positions = "none" if unplaced else "rope"
    if config.relative_position_buckets:
        positions = "relative"
        flags.append(("relative-attention-num-buckets", config.relative_position_buckets))
    if config.learned_positions:
        positions = "learned_absolute"
    flags += [
        ("max-position-embeddings", config.max_seq_len),
        ("position-embedding-type", positions),
        ("normalization", "LayerNorm" if config.norm_bias else "RMSNorm"),
    ]
    flags += flags_of(config, "norm_epsilon")
    if config.rotary_base is not None and positions == "rope":
        flags.append(("rotary-base", round(config.rotary_base)))
    biases_of_qkv = config.qkv_bias is True and not config.linear_bias
    wanted = {
        "swiglu": config.gated_mlp,
        "disable-bias-linear": not config.linear_bias,
        "add-qkv-bias": biases_of_qkv,
        "qk-layernorm": config.qk_norm,
        "untie-embeddings-and-output-weights": not config.tie_embeddings,
    }
    wanted["bert-no-binary-head"] = not config.causal
    flags += switches(wanted)
    if config.attention_sinks:
        flags.append(("softmax-type", "learnable"))
    flags += latent_flags(config) + expert_flags(job)
    flags += window_flags(job) + prediction_flags(job)
    if not config.dropout:
        flags += [("hidden-dropout", 0.0), ("attention-dropout", 0.0)]
    flags += [
        ("vocab-size", config.vocab_size),
        ("make-vocab-size-divisible-by", VOCABULARY_MULTIPLE),
    ]
    return flags


def _training_flags(job: Request) -> Flags:
    training = job.training
    precision = training.precision
    wide = job.problem.software.summed_bits(precision) == 32
    wanted = {
        "accumulate-allreduce-grads-in-fp32": wide,
        "grad-reduce-in-bf16": not wide and precision not in ("fp16", "fp32"),
    }
    flags = [("seq-length", training.seq_len), *read_flags(job.word("precision"))]
    flags += switches(wanted)
    flags += read_flags(job.word("optimizer"))
    flags += read_flags(job.word("attention_kernel"))
    return flags + _switch_flags(job)


def _switch_flags(job: Request) -> Flags:
    """Return the flags of switches that are off by default."""
    training = job.training
    flags = read_flags(job.word("loss")) + read_flags(job.word("cuda_graphs"))
    if training.cuda_graphs == "per_layer" and job.experts is not None:
        # the sizes of routed experts change
        flags.append(("cuda-graph-modules", "attn moe_router"))
    return flags
