"""nanotron: its YAML (`src/nanotron/config`).

nanotron cuts the pipeline itself: it fills a stage until the cumulative cost of its blocks passes the
stage's share (`NanotronModel`, build_model; costs: `LlamaForTraining.get_block_compute_costs`).
A plan with other stages is refused.
"""

from typing import Any

import yaml

from darts_parallel.config import ModelConfig
from darts_parallel.export.common import Exported, Request
from darts_parallel.plans import LayerStrategy
from darts_parallel.problem import VOCABULARY_MULTIPLE

DTYPE = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


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
    notes = (
        "data stages, tokenizer, steps, learning rate, rope_theta and checkpoints are yours: set them",
    )
    return Exported(
        {"nanotron.yaml": head + yaml.safe_dump(settings(job, strategy), sort_keys=False)}, notes
    )


def _check(job: Request) -> None:
    job.require_precision(DTYPE, "its dtype cannot say")
    own, config = stages(job.model, job.plan.pp), job.model
    if config.qk_norm or config.qkv_bias:
        what = f"model={config.name} has qk_norm or qkv_bias, which its Llama lacks"
        job.refuse(what, "a model such as model=llama3_8b")
    if config.head_dim not in (None, config.hidden_size // config.num_heads):
        what = f"model={config.name} has head_dim={config.head_dim}, and its Llama takes another"
        job.refuse(what, "a model with heads of hidden_size / num_heads")
    if own != (mine := [_blocks(job, index) for index in range(job.plan.pp)]):
        what = f"stages of {mine} blocks, and nanotron itself cuts {own} at pp={job.plan.pp}"
        job.refuse(what, "space=uniform space.pp=1")


def _blocks(job: Request, index: int) -> int:
    return job.chunks[index].num_blocks


def stages(config: ModelConfig, pp: int) -> list[int]:
    """Count the blocks of each stage as nanotron cuts them; -1: the cut puts the head on an earlier stage."""
    heads = config.num_heads * (config.head_dim or config.hidden_size // config.num_heads)
    ffn = config.ffn_hidden_size or 4 * config.hidden_size
    block = 4 * heads * config.hidden_size + 3 * ffn * config.hidden_size
    head = config.vocab_size * config.hidden_size
    # embedding, blocks, final norm, head: the rest costs nothing and follows the head
    costs = [0, *[block] * config.num_layers, 0, head]
    total, passed, stage = sum(costs), 0, 0
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
    training, plan, config = job.problem.training, job.plan, job.model
    return {
        "general": {"project": "darts-parallel", "run": config.name, "seed": 42},
        "parallelism": {
            "dp": strategy.dp,
            "pp": plan.pp,
            "tp": strategy.tp,
            "expert_parallel_size": 1,
            "context_parallel_size": plan.cp,
            "pp_engine": "1f1b",
            "tp_mode": "REDUCE_SCATTER" if strategy.sequence_parallel else "ALL_REDUCE",
            "tp_linear_async_communication": False,
            "recompute_layer": job.recompute() == "full",
        },
        "tokens": {
            "sequence_length": training.seq_len,
            "micro_batch_size": job.micro_batch_size(strategy),
            "batch_accumulation_per_replica": plan.num_micro_batches,
            "train_steps": 100,
            "val_check_interval": -1,
        },
        "optimizer": _optimizer(job, strategy),
        "model": {
            "dtype": DTYPE[training.precision],
            "init_method": {"std": 0.02},
            "make_vocab_size_divisible_by": VOCABULARY_MULTIPLE,
            "ddp_bucket_cap_mb": 25,
            "model_config": _model(config),
        },
        "tokenizer": {"tokenizer_name_or_path": config.name, "tokenizer_revision": None},
        "checkpoints": {"checkpoint_interval": 100, "checkpoints_path": "checkpoints"},
        "data_stages": [
            {
                "name": "training",
                "start_training_step": 1,
                "data": {"dataset": None, "num_loading_workers": 1, "seed": 42},
            }
        ],
    }


def _optimizer(job: Request, strategy: LayerStrategy) -> dict[str, Any]:
    factories: dict[str, dict[str, Any]] = {
        "adam": {
            "name": "adamW",
            "adam_beta1": 0.9,
            "adam_beta2": 0.95,
            "adam_eps": 1e-8,
            "torch_adam_is_fused": True,
        },
        "sgd": {"name": "sgd"},
    }
    narrow = job.problem.training.precision == "fp16" or job.problem.software.gradient_bits == 16
    return {
        "zero_stage": strategy.zero_stage,
        "accumulate_grad_in_fp32": not narrow,
        "weight_decay": 0.01,
        "clip_grad": 1.0,
        "optimizer_factory": factories[job.problem.training.optimizer],
        "learning_rate_scheduler": {
            "learning_rate": 3e-4,
            "lr_warmup_steps": 10,
            "lr_warmup_style": "linear",
            "lr_decay_style": "cosine",
            "min_decay_lr": 3e-5,
        },
    }


def _model(config: ModelConfig) -> dict[str, Any]:
    return {
        "is_llama_config": True,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_hidden_size or 4 * config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads or config.num_heads,
        "max_position_embeddings": config.max_seq_len,
        "tie_word_embeddings": config.tie_embeddings,
        "vocab_size": config.vocab_size,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
        "rms_norm_eps": 1e-5,
        "use_cache": False,
    }
