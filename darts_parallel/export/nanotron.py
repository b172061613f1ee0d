"""nanotron: its YAML (`src/nanotron/config`).

nanotron cuts the pipeline itself: it fills a stage until the cumulative cost of its blocks passes
the stage's share (`NanotronModel`, build_model; costs: `LlamaForTraining.get_block_compute_costs`).
A plan with other stages is refused.
"""

from typing import Any

import yaml

from darts_parallel.config import ModelConfig
from darts_parallel.export.common import Exported, Request
from darts_parallel.plans import LayerStrategy
from darts_parallel.problem import VOCABULARY_MULTIPLE

DTYPE = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
FACTORIES: dict[str, dict[str, Any]] = {
    "adam": {
        "name": "adamW",
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "adam_eps": 1e-8,
        "torch_adam_is_fused": True,
    },
    "sgd": {"name": "sgd"},
}
LEARNING_RATE = {
    "learning_rate": 3e-4,
    "lr_warmup_steps": 10,
    "lr_warmup_style": "linear",
    "lr_decay_style": "cosine",
    "min_decay_lr": 3e-5,
}
"""Placeholders: the plan has no learning rate."""


def export(job: Request) -> Exported:
    """Write `nanotron.yaml`.

    Errors:
        UnsupportedError: nanotron cannot express it.
    """
    job.require_llama_like()
    strategy = job.uniform()
    _check(job)
    job.settle()
    head = "".join(f"{line}\n" for line in job.headline())
    text = head + yaml.safe_dump(settings(job, strategy), sort_keys=False)
    note = "data stages, tokenizer, steps, learning rate, rope_theta and checkpoints are yours: set them"
    return Exported({"nanotron.yaml": text}, (note,))


def _check(job: Request) -> None:
    job.require_precision(DTYPE, "its dtype cannot say")
    config = job.model
    if config.qk_norm or config.qkv_bias:
        what = f"model={config.name} has qk_norm or qkv_bias, which its Llama lacks"
        job.refuse(what, "a model such as model=llama3_8b")
    if config.head_dim not in (None, config.hidden_size // config.num_heads):
        what = f"model={config.name} has head_dim={config.head_dim}, and its Llama takes another"
        job.refuse(what, "a model with heads of hidden_size / num_heads")
    planned = [chunk.num_blocks for chunk in job.chunks[: job.plan.pp]]
    own = stages(config, job.plan.pp)
    if planned != own:
        what = f"stages of {planned} blocks, and nanotron itself cuts {own} at pp={job.plan.pp}"
        job.refuse(what, "space=uniform space.pp=1")


def stages(config: ModelConfig, pp: int) -> list[int]:
    """Count the blocks of each stage as nanotron cuts them; -1: the head is on an earlier stage."""
    heads = config.num_heads * (config.head_dim or config.hidden_size // config.num_heads)
    ffn = config.ffn_hidden_size or 4 * config.hidden_size
    block = 4 * heads * config.hidden_size + 3 * ffn * config.hidden_size
    head = config.vocab_size * config.hidden_size
    # embedding, blocks, final norm, head: the rest costs nothing and follows the head
    costs = [0, *[block] * config.num_layers, 0, head]
    total = sum(costs)
    passed = 0
    stage = 0
    counts = [0] * pp
    for index, cost in enumerate(costs):
        if index == len(costs) - 1 and stage != pp - 1:
            return [-1] * pp
        counts[stage] += 1 <= index <= config.num_layers
        passed += cost
        if passed > total * ((stage + 1) / pp) and stage < pp - 1:
            stage += 1
    return counts


def settings(job: Request, strategy: LayerStrategy) -> dict[str, Any]:
    """Return the content of the YAML."""
    general = {"project": "darts-parallel", "run": job.model.name, "seed": 42}
    values: dict[str, Any] = {"general": general}
    values["parallelism"] = _parallelism(job, strategy)
    values["tokens"] = _tokens(job, strategy)
    values["optimizer"] = _optimizer(job, strategy)
    values["model"] = _model(job)
    return values | _yours(job.model.name)


def _parallelism(job: Request, strategy: LayerStrategy) -> dict[str, Any]:
    plan = job.plan
    mode = "REDUCE_SCATTER" if strategy.sequence_parallel else "ALL_REDUCE"
    recompute = job.recompute() == "full"
    overlap = bool(job.training.tp_comm_overlap)
    section = {
        "dp": strategy.dp,
        "pp": plan.pp,
        "tp": strategy.tp,
        "expert_parallel_size": 1,
        "context_parallel_size": plan.cp,
        "pp_engine": "1f1b",
        "tp_mode": mode,
        "tp_linear_async_communication": overlap,
    }
    return section | {"recompute_layer": recompute}


def _tokens(job: Request, strategy: LayerStrategy) -> dict[str, Any]:
    size = job.micro_batch_size(strategy)
    section = {
        "sequence_length": job.training.seq_len,
        "micro_batch_size": size,
        "batch_accumulation_per_replica": job.plan.num_micro_batches,
        "train_steps": 100,
        "val_check_interval": -1,
    }
    return section


def _yours(model: str) -> dict[str, Any]:
    """Return sections with placeholders: tokenizer, checkpoints, data."""
    data = {"dataset": None, "num_loading_workers": 1, "seed": 42}
    sections = {
        "tokenizer": {"tokenizer_name_or_path": model, "tokenizer_revision": None},
        "checkpoints": {"checkpoint_interval": 100, "checkpoints_path": "checkpoints"},
        "data_stages": [{"name": "training", "start_training_step": 1, "data": data}],
    }
    return sections


def _optimizer(job: Request, strategy: LayerStrategy) -> dict[str, Any]:
    training = job.training
    wide = training.precision != "fp16" and job.problem.software.gradient_bits != 16
    factory = FACTORIES[training.optimizer]
    section = {
        "zero_stage": strategy.zero_stage,
        "accumulate_grad_in_fp32": wide,
        "weight_decay": 0.01,
        "clip_grad": 1.0,
        "optimizer_factory": factory,
        "learning_rate_scheduler": LEARNING_RATE,
    }
    return section


def _model(job: Request) -> dict[str, Any]:
    dtype = DTYPE[job.training.precision]
    llama = _llama(job.model)
    section = {
        "dtype": dtype,
        "init_method": {"std": 0.02},
        "make_vocab_size_divisible_by": VOCABULARY_MULTIPLE,
        "ddp_bucket_cap_mb": 25,
        "model_config": llama,
    }
    return section


def _llama(config: ModelConfig) -> dict[str, Any]:
    ffn = config.ffn_hidden_size or 4 * config.hidden_size
    kv_heads = config.num_kv_heads or config.num_heads
    section = {
        "is_llama_config": True,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": ffn,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": config.max_seq_len,
        "tie_word_embeddings": config.tie_embeddings,
        "vocab_size": config.vocab_size,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
        "rms_norm_eps": 1e-5,
        "use_cache": False,
    }
    return section
