"""torchtitan: a Python function that sets the fields of a `Trainer.Config` (TOML is gone since 2026).

Names: `torchtitan/config` (`ParallelismConfig`, `TrainingConfig`) and
`torchtitan/distributed/activation_checkpoint.py`, of release 0.3.0 (batch sizes) and of main at b5bcd76c
(token budgets): the function asks the configuration which of the two it is.
"""

from typing import Any

from darts_parallel.export.common import ChunkContent, Exported, Request
from darts_parallel.plans import LayerStrategy, Plan
from darts_parallel.schedules import Schedule, find, search_start, usual_schedule

ORDER = "torchtitan_order.csv"
"""The passes of every device, where torch has no class that writes them."""
MIXED_PARAMETER = {"bf16": "bfloat16", "fp32": "float32"}


def export(job: Request) -> Exported:
    """Write the module `torchtitan_plan.py` with the function `apply_plan`.

    Errors:
        UnsupportedError: torchtitan has no fields for it.
    """
    job.require_llama_like()
    strategy = job.uniform()
    _check(job)
    job.shard_degrees(strategy)
    job.settle()
    recompute = job.recompute() == "full"
    lines = _head(job, recompute)
    lines += _assignments("parallelism", parallelism_fields(job, strategy))
    files = dict[str, str]()
    if job.plan.pp > 1 and job.plan.passes.pytorch is None:
        files[ORDER] = "\n".join(map(",".join, job.plan.pass_names)) + "\n"
        path = f'str(Path(__file__).with_name("{ORDER}"))'
        lines += [f"    config.parallelism.pipeline_parallel_schedule_csv = {path}"]
        lines.insert(
            lines.index("from torchtitan.trainer import Trainer"), "from pathlib import Path\n"
        )
    types = {"param": MIXED_PARAMETER[job.problem.training.precision], "reduce": "float32"}
    lines += [
        f'    config.training.mixed_precision_{name} = "{own}"' for name, own in types.items()
    ]
    strategies = [strategy, job.experts or strategy]
    if job.plan.pp > 1 or max(each.ep for each in strategies) > 1:
        lines += [
            "    config.training.disable_cuda_graphs = True  # not with pipelines or divided experts"
        ]
    lines += ['    if hasattr(config.training, "num_tokens_per_train_step"):  # main']
    lines += _assignments("training", _token_fields(job, strategy), 8)
    if job.plan.pp > 1:
        lines += _assignments("parallelism", {"num_pp_microbatches": job.plan.num_micro_batches}, 8)
    lines += ["    else:  # 0.3.0"]
    lines += _assignments("training", _batch_fields(job, strategy), 8)
    if job.plan.pp > 1:
        size = {"pipeline_parallel_microbatch_size": job.micro_batch_size(strategy)}
        lines += _assignments("parallelism", size, 8)
    lines += [f"    config.activation_checkpoint = {'FullAC.Config()' if recompute else 'None'}"]
    lines += ["    return config"]
    return Exported({"torchtitan_plan.py": "\n".join(lines) + "\n"} | files, (_note(job),))


def _head(job: Request, recompute: bool) -> list[str]:
    """Write the module down to the function's first lines, which refuse a model of another depth."""
    lines = [
        '"""torchtitan configuration of a plan, for release 0.3.0 and for main of 2026.',
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
    return [
        *lines,
        "from torchtitan.trainer import Trainer",
        "",
        "",
        "def apply_plan(config: Trainer.Config) -> Trainer.Config:",
        '    """`config` with the parallelism, token budgets and activation checkpointing of the plan."""',
        '    layers = getattr(getattr(config.model_spec, "model", None), "layers", None)',
        f"    if layers is not None and len(layers) != {job.model.num_layers}:",
        f'        raise ValueError(f"{{len(layers)}} layers, but the plan has {job.model.num_layers}")',
    ]


def _note(job: Request) -> str:
    config = job.model
    return (
        f"give apply_plan a configuration of {config.name}'s sizes: {config.num_layers} layers, hidden size "
        f"{config.hidden_size}, {config.num_heads} heads; torchtitan has Llama 3 and Qwen 3, not Mistral"
    )


def _assignments(section: str, values: dict[str, Any], indent: int = 4) -> list[str]:
    return [
        f"{' ' * indent}config.{section}.{name} = {_literal(value)}"
        for name, value in values.items()
    ]


def _check(job: Request) -> None:
    own_heads = job.model.head_dim in (None, job.model.hidden_size // job.model.num_heads)
    if job.model.qkv_bias or not (own_heads or job.model.qk_norm):
        what = "qkv_bias" if job.model.qkv_bias else f"head_dim={job.model.head_dim}"
        what = f"model={job.model.name} has {what}, which its Llama 3 and Qwen 3 lack"
        job.refuse(what, "a model such as model=llama3_8b")
    job.require_precision(MIXED_PARAMETER, "its fields cannot set")


def parallelism_fields(job: Request, strategy: LayerStrategy) -> dict[str, Any]:
    """Return the fields of its `ParallelismConfig`."""
    plan, (replicas, sharded) = job.plan, job.shard_degrees(strategy)
    values: dict[str, Any] = {
        "data_parallel_replicate_degree": replicas,
        "data_parallel_shard_degree": sharded,
        "fsdp_reshard_after_forward": "always" if strategy.zero_stage == 3 else "never",
        "tensor_parallel_degree": strategy.tp,
        "enable_sequence_parallel": strategy.sequence_parallel,
        "context_parallel_degree": plan.cp,
        "pipeline_parallel_degree": plan.pp,
        **({"expert_parallel_degree": job.experts.ep} if job.experts else {}),
    }
    if plan.pp > 1:
        # an order in a CSV still needs a class, which decides where the stages lie
        rules = (plan.passes, _usual(plan))
        names = [rule.pytorch_class(plan.pp, plan.num_micro_batches) for rule in rules]
        values["pipeline_parallel_schedule"] = names[0] or names[1]
        values["module_fqns_per_model_part"] = [_modules(chunk) for chunk in job.chunks]
    return values


def _usual(plan: Plan) -> Schedule:
    """Return the schedule with a class of PyTorch's that places stages as the plan does."""
    if plan.passes.folded:
        return search_start(plan.passes.placement)
    return find(usual_schedule(plan.virtual_stages))


def _modules(chunk: ChunkContent) -> list[str]:
    blocks = [f"layers.{chunk.first_block + i}" for i in range(chunk.num_blocks)]
    return ["tok_embeddings"] * chunk.embedding + blocks + ["norm", "lm_head"] * chunk.head


def _batch_fields(job: Request, strategy: LayerStrategy) -> dict[str, Any]:
    """Return sequences, as release 0.3.0 counts them: a pipeline cuts the local batch into micro-batches."""
    training, size = job.problem.training, job.micro_batch_size(strategy)
    return {
        "local_batch_size": size * job.plan.num_micro_batches if job.plan.pp > 1 else size,
        "global_batch_size": training.global_batch_size,
        "seq_len": training.seq_len,
    }


def _token_fields(job: Request, strategy: LayerStrategy) -> dict[str, Any]:
    """Return tokens, as main counts them."""
    training = job.problem.training
    return {
        "num_tokens_per_microbatch_per_dp_rank": job.micro_batch_size(strategy) * training.seq_len,
        "num_tokens_per_train_step": training.global_batch_size * training.seq_len,
        "max_context_length": training.seq_len,
    }


def _literal(value: Any) -> str:
    if isinstance(value, list):
        return "[\n" + "".join(f"        {_row(row)},\n" for row in value) + "    ]"
    return f'"{value}"' if isinstance(value, str) else str(value)


def _row(names: list[str]) -> str:
    return "[" + ", ".join(f'"{name}"' for name in names) + "]"
