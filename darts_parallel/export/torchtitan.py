"""torchtitan: a Python function that sets the fields of a `Trainer.Config` (TOML is gone since 2026).

Names: `torchtitan/config` (`ParallelismConfig`, `TrainingConfig` with its token budgets) and
`torchtitan/distributed/activation_checkpoint.py`.
"""

from typing import Any

from darts_parallel.export.common import Chunk, Exported, Job
from darts_parallel.plan.strategy import LayerStrategy

SCHEDULES = {
    "1f1b": "1F1B",
    "gpipe": "GPipe",
    "interleaved": "Interleaved1F1B",
    "zero_bubble_v": "ZBVZeroBubble",
    "dualpipe": "DualPipeV",
}
"""Its names of schedules, which are PyTorch's (`torch.distributed.pipelining`)."""
MIXED_PARAMETER = {"bf16": "bfloat16", "fp32": "float32"}


def export(job: Job) -> Exported:
    """The module `torchtitan_plan.py` with the function `apply_plan`.

    Errors:
        UnsupportedError: torchtitan has no fields for it.
    """
    job.require_llama_like()
    strategy = job.uniform()
    job.require_exact_collectives()
    _check(job, strategy)
    sections = {
        "parallelism": parallelism_fields(job, strategy),
        "training": _training_fields(job, strategy),
    }
    recompute = job.recompute() == "full"
    lines = [
        '"""torchtitan configuration of a plan.',
        "",
        "Call it in a config function of the model's config_registry.py, on the configuration of its sizes:",
        "    def planned() -> Trainer.Config:",
        "        return apply_plan(llama3_8b())",
        '"""',
        "",
        *job.headline(),
        "",
    ]
    if recompute:
        lines.append("from torchtitan.distributed.activation_checkpoint import FullAC")
    lines += ["from torchtitan.trainer import Trainer", "", ""]
    lines += ["def apply_plan(config: Trainer.Config) -> Trainer.Config:"]
    lines += [
        '    """`config` with the parallelism, token budgets and activation checkpointing of the plan."""'
    ]
    for section, values in sections.items():
        lines += [f"    config.{section}.{name} = {_literal(value)}" for name, value in values.items()]
    lines += [f"    config.activation_checkpoint = {'FullAC.Config()' if recompute else 'None'}"]
    lines += ["    return config"]
    return Exported({"torchtitan_plan.py": "\n".join(lines) + "\n"})


def _check(job: Job, strategy: LayerStrategy) -> None:
    plan, precision = job.plan, job.problem.training.precision
    if strategy.zero_stage == 1:
        raise job.refuse(
            "zero_stage=1, and its data parallelism replicates all state or shards gradients too",
            "space=uniform space.zero_stage=[0,2,3]",
        )
    if plan.cp > 1 and strategy.zero_stage < 2:
        raise job.refuse(
            f"cp={plan.cp} with zero_stage={strategy.zero_stage}, and its cp shards parameters",
            "space=uniform space.zero_stage=[2,3]",
        )
    if job.model.tie_embeddings and plan.pp > 1:
        raise job.refuse(
            f"tie_embeddings=true with pp={plan.pp}, and its pipeline cannot split tied tables",
            "space=uniform space.pp=1",
        )
    if job.recompute() == "selective":
        raise job.refuse(
            "recompute=selective, and its selective checkpointing saves by operation, not all but attention",
            "space=uniform space.recompute=[none,full]",
        )
    if precision not in MIXED_PARAMETER:
        raise job.refuse(
            f"training.precision={precision}, which its fields cannot set", "training.precision=bf16"
        )


def parallelism_fields(job: Job, strategy: LayerStrategy) -> dict[str, Any]:
    """Fields of its `ParallelismConfig`."""
    plan, (replicas, sharded) = job.plan, job.shard_degrees(strategy)
    values: dict[str, Any] = {
        "data_parallel_replicate_degree": replicas,
        "data_parallel_shard_degree": sharded,
        "fsdp_reshard_after_forward": "always" if strategy.zero_stage == 3 else "never",
        "tensor_parallel_degree": strategy.tp,
        "enable_sequence_parallel": strategy.sequence_parallel,
        "context_parallel_degree": plan.cp,
        "pipeline_parallel_degree": plan.pp,
    }
    if plan.pp > 1:
        job.require_schedule(*SCHEDULES)
        values["pipeline_parallel_schedule"] = SCHEDULES[plan.schedule_name]
        values["num_pp_microbatches"] = plan.num_micro_batches
        values["module_fqns_per_model_part"] = [_modules(chunk) for chunk in job.chunks]
    return values


def _modules(chunk: Chunk) -> list[str]:
    blocks = [f"layers.{chunk.first_block + i}" for i in range(chunk.num_blocks)]
    return ["tok_embeddings"] * chunk.embedding + blocks + ["norm", "lm_head"] * chunk.head


def _training_fields(job: Job, strategy: LayerStrategy) -> dict[str, Any]:
    training = job.problem.training
    return {
        "num_tokens_per_microbatch_per_dp_rank": job.micro_batch_size(strategy) * training.seq_len,
        "num_tokens_per_train_step": training.global_batch_size * training.seq_len,
        "max_context_length": training.seq_len,
        "mixed_precision_param": MIXED_PARAMETER[training.precision],
        "mixed_precision_reduce": "float32",
    }


def _literal(value: Any) -> str:
    if isinstance(value, list):
        return "[\n" + "".join(f"        {_row(row)},\n" for row in value) + "    ]"
    return f'"{value}"' if isinstance(value, str) else str(value)


def _row(names: list[str]) -> str:
    return "[" + ", ".join(f'"{name}"' for name in names) + "]"
