"""torchtitan: a Python function that sets the fields of a `Trainer.Config`.

Names: `torchtitan/config` (`ParallelismConfig`, `TrainingConfig`) and
`torchtitan/distributed/activation_checkpoint.py`, of release 0.3.0 (batch sizes) and of main at
b5bcd76c (token budgets): the function asks the configuration which of the two it is.
"""

import json
from typing import Any

from darts_parallel.config import as_yaml
from darts_parallel.errors import Entries
from darts_parallel.export.common import ChunkContent, Exported, Request
from darts_parallel.plans import LayerStrategy, Plan
from darts_parallel.schedules import Schedule, find, search_start, usual_schedule

ORDER = "torchtitan_order.csv"
"""The passes of every device, where torch has no class that writes them."""
MODULE = '''"""torchtitan configuration of a plan, for release 0.3.0 and for main of 2026.

Call it in a config function of the model's config_registry.py, on the configuration of its sizes:
    def planned() -> Trainer.Config:
        return apply_plan(llama3_8b())
"""

{headline}

{imports}from torchtitan.trainer import Trainer


def apply_plan(config: Trainer.Config) -> Trainer.Config:
    """`config` with the parallelism, token budgets and activation checkpointing of the plan."""
    layers = getattr(getattr(config.model_spec, "model", None), "layers", None)
    if layers is not None and len(layers) != {layers}:
        raise ValueError(f"{{len(layers)}} layers, but the plan has {layers}")
{body}
    return config
'''
"""The written module; it refuses a model of another depth."""
BATCHES = """\
    if hasattr(config.training, "num_tokens_per_train_step"):  # main
        config.training.num_tokens_per_microbatch_per_dp_rank = {tokens}
        config.training.num_tokens_per_train_step = {step_tokens}
        config.training.max_context_length = {length}{main}
    else:  # 0.3.0
        config.training.local_batch_size = {local}
        config.training.global_batch_size = {batch}
        config.training.seq_len = {length}{release}"""
MAIN_PIPELINE = """
        config.parallelism.num_pp_microbatches = {count}"""
RELEASE_PIPELINE = """
        config.parallelism.pipeline_parallel_microbatch_size = {size}"""


def export(job: Request) -> Exported:
    """Write the module `torchtitan_plan.py` with the function `apply_plan`.

    Errors:
        UnsupportedError: torchtitan has no fields for it.
    """
    strategy = checked_strategy(job)
    recompute = {"full": "FullAC", "selective": "SelectiveAC"}.get(job.recompute(), "")
    pipeline = job.plan.pp > 1
    files = {}
    lines = _assignments("parallelism", parallelism_fields(job, strategy))
    if pipeline and job.plan.passes.pytorch is None:
        files[ORDER] = "\n".join(map(",".join, job.plan.pass_names)) + "\n"
        path = f'str(Path(__file__).with_name("{ORDER}"))'
        lines.append(f"    config.parallelism.pipeline_parallel_schedule_csv = {path}")
    lines += _assignments("training", mixed_precision(job))
    lines += [*_switches(job), _batches(job, strategy)]
    activation = f"{recompute}.Config()" if recompute else None
    lines.append(f"    config.activation_checkpoint = {activation}")
    imports = []
    if job.training.loss == "chunked":
        imports.append("from torchtitan.components.loss import ChunkedLossWrapper")
    if recompute:
        imports.append(f"from torchtitan.distributed.activation_checkpoint import {recompute}")
    if files:
        imports.append("from pathlib import Path\n")
    head = "".join(f"{line}\n" for line in imports)
    body = "\n".join(lines)
    module = MODULE.format(
        headline=job.headline(), imports=head, layers=job.model.num_layers, body=body
    )
    return Exported(
        {"torchtitan_plan.py": module} | files,
        (f"give apply_plan a configuration of {sizes(job)}",),
    )


def checked_strategy(job: Request) -> LayerStrategy:
    """Return the strategy of all layers of a model that is torchtitan's own.

    Errors:
        UnsupportedError: layers differ, or the model is none of torchtitan's.
    """
    strategy = job.uniform()
    _check(job)
    job.shard_degrees(strategy)
    job.settle()
    return strategy


def mixed_precision(job: Request) -> Entries:
    """Return the fields of `training` with the types of parameters and of reduced gradients."""
    return {"mixed_precision_param": job.word("precision"), "mixed_precision_reduce": "float32"}


def _switches(job: Request) -> list[str]:
    """Write the switches of the job; a chunked loss is the wrapper of the model's own."""
    training = job.training
    graphs = {"disable_cuda_graphs": training.cuda_graphs == "none"}
    compiled = {
        "enable": bool(training.compiled),
        "enable_async_tensor_parallel": bool(training.tp_comm_overlap),
    }
    lines = _assignments("training", graphs) + _assignments("compile", compiled)
    if training.optimizer == "adam_bf16_moments":
        lines += _assignments("optimizer", {"implementation": "fused_opt_states_bf16"})
    inner = 'getattr(config.loss, "loss_fn", config.loss)'
    chunked = f"ChunkedLossWrapper.Config(loss_fn={inner})"
    return [*lines, f"    config.loss = {chunked if training.loss == 'chunked' else inner}"]


def _batches(job: Request, strategy: LayerStrategy) -> str:
    """Write the batch sizes: tokens for main, sequences for release 0.3.0, where a pipeline cuts a batch."""
    training = job.training
    size = job.micro_batch_size(strategy)
    count = 1
    main = release = ""
    if job.plan.pp > 1:
        count = job.plan.num_micro_batches
        main = MAIN_PIPELINE.format(count=count)
        release = RELEASE_PIPELINE.format(size=size)
    length = training.seq_len
    sizes = {"tokens": size * length, "local": size * count, "length": length}
    batch = training.global_batch_size
    step_tokens = batch * length
    return BATCHES.format(**sizes, batch=batch, step_tokens=step_tokens, main=main, release=release)


def sizes(job: Request) -> str:
    """Describe the model that a file is for."""
    config = job.model
    return (
        f"{config.name}'s sizes: {config.num_layers} layers, hidden size "
        f"{config.hidden_size}, {config.num_heads} heads; the file is for its Llama 3 and Qwen 3"
    )


def _assignments(section: str, values: Entries) -> list[str]:
    return [f"    config.{section}.{name} = {_literal(value)}" for name, value in values.items()]


def _check(job: Request) -> None:
    model = job.model
    own_heads = model.head_size == model.hidden_size // model.num_heads
    if not (own_heads or model.qk_norm):
        what = f"model={model.name} has head_dim={model.head_dim}"
        job.refuse(f"{what}, which its Llama 3 and Qwen 3 lack", "a model such as model=llama3_8b")
    modules = job.training.recompute_modules
    if modules != ["core_attn"] and not model.num_experts:  # blocks of experts have no SelectiveAC
        what = f"training.recompute_modules={as_yaml(modules)}"
        what += ", and its selective checkpointing repeats every second product"
        job.refuse(what, "training.recompute_modules=[core_attn]")


def parallelism_fields(job: Request, strategy: LayerStrategy, head: str = "lm_head") -> Entries:
    """Return the fields of its `ParallelismConfig`.

    Args:
        head: Name of the module behind the last norm.
    """
    plan = job.plan
    replicas, sharded = job.shard_degrees(strategy)
    gathered_again = "always" if strategy.zero_stage == 3 else "never"
    values = {
        "data_parallel_replicate_degree": replicas,
        "data_parallel_shard_degree": sharded,
        "fsdp_reshard_after_forward": gathered_again,
        "tensor_parallel_degree": strategy.tp,
        "enable_sequence_parallel": strategy.sequence_parallel,
        "context_parallel_degree": plan.cp,
        "pipeline_parallel_degree": plan.pp,
    }
    if job.experts:
        values["expert_parallel_degree"] = job.experts.ep
    if plan.pp > 1:
        # an order in a CSV still needs a class, which decides where the stages lie
        rules = (plan.passes, _usual(plan))
        names = [rule.pytorch_class(plan.pp, plan.num_micro_batches) for rule in rules]
        values["pipeline_parallel_schedule"] = names[0] or names[1]
        values["module_fqns_per_model_part"] = [_modules(chunk, head) for chunk in job.chunks]
    return values


def _usual(plan: Plan) -> Schedule:
    """Return the schedule with a class of PyTorch's that places stages as the plan does."""
    if plan.passes.folded:
        return search_start(plan.passes.placement)
    return find(usual_schedule(plan.virtual_stages))


def _modules(chunk: ChunkContent, head: str) -> list[str]:
    blocks = [f"layers.{chunk.first_block + i}" for i in range(chunk.num_blocks)]
    return ["tok_embeddings"] * chunk.embedding + blocks + ["norm", head] * chunk.head


def _literal(value: Any) -> str:
    if isinstance(value, list):
        rows = "".join(f"        {json.dumps(row)},\n" for row in value)
        return f"[\n{rows}    ]"
    return json.dumps(value) if isinstance(value, str) else str(value)
