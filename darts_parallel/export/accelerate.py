"""Hugging Face accelerate: the YAML of `accelerate launch` (FSDP2) and `ParallelismConfig`.

Written for accelerate 1.15. `ParallelismConfig` has no pipeline; it refuses replicas without
sharding next to tensor or context parallelism, and FSDP without a dimension to shard over
(`src/accelerate/parallelism_config.py`). Gradients stay whole until the last of several
micro-batches unless they are synchronised at each (`GradientAccumulationPlugin`). Tensor and
context parallelism are the model's and the training loop's: the file next to the YAML holds both.
"""

from darts_parallel.export.common import Exported, Request, yaml_word
from darts_parallel.export.huggingface import half_type, imports, model_text
from darts_parallel.plans import LayerStrategy

_FILE = """\
compute_environment: LOCAL_MACHINE
distributed_type: {kind}
{fsdp}machine_rank: 0
{main}main_training_function: main
mixed_precision: {precision}
num_machines: {nodes}
num_processes: {devices}
{mesh}rdzv_backend: static
same_network: true
use_cpu: false
"""
_FSDP = """\
fsdp_config:
  fsdp_activation_checkpointing: {again}
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_cpu_ram_efficient_loading: {one_loads}
  fsdp_offload_params: false
  fsdp_reshard_after_forward: {weights}
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_version: 2
"""
_MAIN = """\
main_process_ip: 127.0.0.1
main_process_port: 29500
"""
_MESH = """\
parallelism_config:
  parallelism_config_cp_size: {cp_size}
  parallelism_config_dp_replicate_size: {dp_replicate_size}
  parallelism_config_dp_shard_size: {dp_shard_size}
  parallelism_config_tp_size: {tp_size}
"""
_ACCELERATOR = '''

def planned_accelerator() -> Accelerator:
    """The accelerator; start its program by `accelerate launch --config_file accelerate.yaml`."""
    accelerator = Accelerator(
{note}        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps={count}, sync_each_batch={each}
        ),
{parallelism}    )
{sums}    return accelerator
'''
_SUMS = """\
    # the policy of accelerate itself sums gradients in 16 bits
    accelerator.state.fsdp_plugin.mixed_precision_policy = MixedPrecisionPolicy(
        param_dtype=torch.{dtype}, reduce_dtype=torch.float32, output_dtype=torch.{dtype}
    )
"""
"""Takes the place of what its FSDP plugin sets for a mixed precision (accelerate 1.15)."""
_WHOLE_GRADIENTS = """\
        # the gradients of every micro-batch are reduced and sharded: whole ones would not fit
"""
_BESIDE_FSDP = """\
    if not hasattr(tensor_parallel, "ReplicateParallel"):
        raise ImportError("tensor parallelism beside FSDP wants transformers==5.0.0")
"""
"""accelerate 1.15 imports it when it prepares a model; transformers 5.1.0 lacks it."""
_CONTEXT_PARALLEL = '''

def planned_step(accelerator: Accelerator, model: Any, batch: dict[str, Any]) -> Any:
    """Loss of a micro-batch whose sequences are divided; outside of this context they would not be."""
    model.set_attn_implementation("sdpa")  # eager attention stays inside each part, in silence
    batch = {key: tensor for key, tensor in batch.items() if key != "attention_mask"}
    labels = torch.nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:].contiguous()
    positions = torch.arange(labels.shape[1], device=labels.device).repeat(labels.shape[0], 1)
    # a part knows neither its place in the sequence nor the token that follows it, nor all tokens
    batch |= {"shift_labels": labels, "position_ids": positions}
    count = (labels != -100).sum() / CONTEXT_PARALLEL
    buffers = list(batch.values())
    with accelerator.maybe_context_parallel(
        buffers=buffers, buffer_seq_dims=[1] * len(buffers), no_restore_buffers=set(buffers)
    ):
        return model(**batch, num_items_in_batch=count).loss
'''


def export(job: Request) -> Exported:
    """Write `accelerate.yaml` and `accelerate_plan.py`.

    Errors:
        UnsupportedError: accelerate cannot express it.
    """
    strategy = job.uniform()
    job.shard_degrees(strategy)
    job.settle()
    text = f"{job.headline()}\n{settings(job, strategy)}"
    files = {"accelerate.yaml": text, "accelerate_plan.py": _snippet(job, strategy)}
    return Exported(files, tuple(_notes(job, strategy)))


def _notes(job: Request, strategy: LayerStrategy) -> list[str]:
    notes = [
        "data and optimizer are yours: accelerate_plan.py has the accelerator and loads the model"
    ]
    if job.nodes[0] > 1:
        notes.append(
            "on every node: accelerate launch --config_file accelerate.yaml --machine_rank RANK "
            "--main_process_ip ADDRESS; both are placeholders in the file"
        )
    if strategy.tp > 1 and _fsdp(job, strategy):
        notes.append(
            "tensor parallelism beside FSDP wants transformers==5.0.0, the last one with ReplicateParallel, "
            "which accelerate 1.15 imports"
        )
    return notes


def _fsdp(job: Request, strategy: LayerStrategy) -> bool:
    """Return whether state is sharded over several ranks (FSDP2); else they replicate it (DDP)."""
    return strategy.zero_stage > 0 and strategy.dp * job.plan.cp > 1


def parallelism(job: Request, strategy: LayerStrategy) -> dict[str, int]:
    """Return the fields of `ParallelismConfig`; their product is the number of processes."""
    replicas, sharded = job.shard_degrees(strategy)
    data = {"dp_replicate_size": replicas, "dp_shard_size": sharded}
    return data | {"tp_size": strategy.tp, "cp_size": job.plan.cp}


def settings(job: Request, strategy: LayerStrategy) -> str:
    """Return the YAML."""
    devices = job.problem.cluster.num_devices
    nodes, _ = job.nodes
    kind = "MULTI_GPU" if devices > 1 else "NO"
    fsdp = mesh = ""
    if _fsdp(job, strategy):
        kind = "FSDP"
        fsdp = _fsdp_settings(job, strategy)
    if not _replicas_only(job, strategy):
        mesh = _MESH.format(**parallelism(job, strategy))
    main = _MAIN if nodes > 1 else ""
    blocks = {"fsdp": fsdp, "main": main, "mesh": mesh}
    words = {"kind": yaml_word(kind), "precision": yaml_word(job.word("precision"))}
    return _FILE.format(nodes=nodes, devices=devices, **blocks, **words)


def _fsdp_settings(job: Request, strategy: LayerStrategy) -> str:
    again = yaml_word(job.recompute() == "full")
    weights = yaml_word(strategy.zero_stage == 3)
    one_loads = yaml_word(strategy.tp == 1)  # parts of tensors would be loaded as if whole
    return _FSDP.format(again=again, weights=weights, one_loads=one_loads)


def _replicas_only(job: Request, strategy: LayerStrategy) -> bool:
    return not _fsdp(job, strategy) and strategy.tp == 1 and job.plan.cp == 1


def _snippet(job: Request, strategy: LayerStrategy) -> str:
    """Write the module with the accelerator and the model of the plan."""
    context = job.plan.cp > 1
    sharded = _fsdp(job, strategy)
    beside_fsdp = sharded and strategy.tp > 1
    lines = ['"""accelerate objects of a plan."""', "", job.headline(), ""]
    typing, *others = imports(job)
    others += [
        "from accelerate import Accelerator",
        "from accelerate.utils import GradientAccumulationPlugin",
    ]
    if not _replicas_only(job, strategy):
        others.append("from accelerate.parallelism_config import ParallelismConfig")
    if sharded:
        others.append("from torch.distributed.fsdp import MixedPrecisionPolicy")
    if beside_fsdp:
        others.append("from transformers.integrations import tensor_parallel")
    # as ruff does: whole modules first, then by name
    others.sort(key=lambda line: (line.startswith("from"), line))
    lines += [
        typing,
        *others,
        "",
        f"MICRO_BATCH_SIZE = {job.micro_batch_size(strategy)}",
        '"""Sequences of one batch of the data loader, per process."""',
    ]
    if context:
        lines.append(f"CONTEXT_PARALLEL = {job.plan.cp}")
    text = "\n".join(lines) + "\n" + _accelerator(job, strategy)
    mesh = ', tp_plan="auto", device_mesh=accelerator.torch_device_mesh'
    dtype = half_type(job) if job.training.lora_rank else "float32"
    text += model_text(
        job,
        dtype,
        checkpointing=not sharded,
        mesh=mesh if strategy.tp > 1 else "",
        check=_BESIDE_FSDP if beside_fsdp else "",
    )
    return text + _CONTEXT_PARALLEL * context


def _accelerator(job: Request, strategy: LayerStrategy) -> str:
    """Write the function that makes the accelerator."""
    count = job.plan.num_micro_batches
    sharded = _fsdp(job, strategy)
    each = sharded and count > 1
    line = ""
    if not _replicas_only(job, strategy):
        sizes = parallelism(job, strategy).items()
        fields = ", ".join(f"{name}={size}" for name, size in sizes)
        line = f"        parallelism_config=ParallelismConfig({fields}),\n"
    note = _WHOLE_GRADIENTS * each
    sums = _SUMS.format(dtype=half_type(job)) if sharded else ""
    return _ACCELERATOR.format(note=note, count=count, each=each, parallelism=line, sums=sums)
