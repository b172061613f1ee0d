"""Hugging Face accelerate: `accelerate.yaml` for `accelerate launch` (FSDP2) and `ParallelismConfig`.

`ParallelismConfig` has no pipeline; it refuses replicas without sharding beside tensor or context
parallelism (`src/accelerate/parallelism_config.py`).
"""

from typing import Any

import yaml

from darts_parallel.export.common import Exported, Job
from darts_parallel.plan.strategy import LayerStrategy

PRECISION = {"bf16": "bf16", "fp16": "fp16", "fp8": "fp8", "fp32": "no"}


def export(job: Job) -> Exported:
    """`accelerate.yaml` and `accelerate_plan.py`.

    Errors:
        UnsupportedError: accelerate cannot express it.
    """
    strategy = job.uniform()
    job.require_exact_collectives()
    _check(job, strategy)
    values = settings(job, strategy)
    head = "".join(f"{line}\n" for line in job.headline())
    text = head + yaml.safe_dump(values, sort_keys=True)
    return Exported({"accelerate.yaml": text, "accelerate_plan.py": _snippet(job, strategy)})


def _check(job: Job, strategy: LayerStrategy) -> None:
    plan = job.plan
    if plan.pp > 1:
        raise job.refuse(f"pp={plan.pp}, and it has no pipeline", "space=uniform space.pp=1")
    if strategy.zero_stage == 1:
        raise job.refuse(
            "zero_stage=1, and FSDP2 shards gradients too",
            "space=uniform space.pp=1 space.zero_stage=[0,2,3]",
        )
    if strategy.zero_stage == 0 and strategy.dp > 1 and (strategy.tp > 1 or plan.cp > 1):
        raise job.refuse(
            f"zero_stage=0 with dp={strategy.dp} and tp={strategy.tp}, cp={plan.cp}, and it replicates only "
            "where nothing else divides the model",
            "space=uniform space.pp=1 space.zero_stage=[2,3]",
        )
    if strategy.sequence_parallel:
        raise job.refuse(
            "sequence_parallel=true, which its tensor parallelism lacks",
            "space=uniform space.pp=1 space.sequence_parallel=false",
        )
    precision = job.problem.training.precision
    if precision not in PRECISION:
        raise job.refuse(
            f"training.precision={precision}, which its settings cannot say", "training.precision=bf16"
        )
    if job.recompute() == "selective":
        raise job.refuse(
            "recompute=selective, and FSDP's checkpointing takes whole blocks",
            "space=uniform space.pp=1 space.recompute=[none,full]",
        )


def _fsdp(job: Job, strategy: LayerStrategy) -> bool:
    """Whether FSDP2 and its device mesh are needed; else every process replicates all (DDP)."""
    return strategy.zero_stage > 0 or strategy.tp > 1 or job.plan.cp > 1 or job.recompute() == "full"


def parallelism(job: Job, strategy: LayerStrategy) -> dict[str, int]:
    """Fields of `ParallelismConfig`; their product is the number of processes."""
    replicas, sharded = job.shard_degrees(strategy)
    return {
        "dp_replicate_size": replicas,
        "dp_shard_size": sharded,
        "tp_size": strategy.tp,
        "cp_size": job.plan.cp,
    }


def settings(job: Job, strategy: LayerStrategy) -> dict[str, Any]:
    """The YAML."""
    devices = job.problem.cluster.num_devices
    fsdp = _fsdp(job, strategy)
    nodes, _ = job.nodes
    values: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP" if fsdp else "MULTI_GPU" if devices > 1 else "NO",
        "machine_rank": 0,
        "main_training_function": "main",
        "mixed_precision": PRECISION[job.problem.training.precision],
        "num_machines": nodes,
        "num_processes": devices,
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": False,
    }
    if fsdp:
        values["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_reshard_after_forward": strategy.zero_stage == 3,
            "fsdp_activation_checkpointing": job.recompute() == "full",
            "fsdp_offload_params": False,
            "fsdp_cpu_ram_efficient_loading": True,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        }
        if not _replicas_only(job, strategy):
            values["parallelism_config"] = {
                f"parallelism_config_{name}": size for name, size in parallelism(job, strategy).items()
            }
    return values


def _replicas_only(job: Job, strategy: LayerStrategy) -> bool:
    return strategy.zero_stage == 0 and strategy.tp == 1 and job.plan.cp == 1


def _snippet(job: Job, strategy: LayerStrategy) -> str:
    fields = ", ".join(f"{name}={size}" for name, size in parallelism(job, strategy).items())
    plain = not _fsdp(job, strategy) or _replicas_only(job, strategy)
    lines = ['"""accelerate objects of a plan."""', "", *job.headline(), ""]
    lines += ["from accelerate import Accelerator"]
    if not plain:
        lines += ["from accelerate.parallelism_config import ParallelismConfig"]
    lines += [
        "",
        f"MICRO_BATCH_SIZE = {job.micro_batch_size(strategy)}",
        '"""Sequences of one batch of the data loader, per process."""',
        "",
        "",
        "def planned_accelerator() -> Accelerator:",
        '    """The accelerator; start its program by `accelerate launch --config_file accelerate.yaml`."""',
        "    return Accelerator(",
        f"        gradient_accumulation_steps={job.plan.num_micro_batches},",
        *([] if plain else [f"        parallelism_config=ParallelismConfig({fields}),"]),
        "    )",
    ]
    return "\n".join(lines) + "\n"
