"""nanotron: its YAML (`src/nanotron/config`).

nanotron cuts the pipeline itself (`own_stage_refusal`). A plan with other stages is refused.
"""

from darts_parallel.errors import Entries
from darts_parallel.export.common import Exported, Request, yaml_word
from darts_parallel.plans import LayerStrategy, own_stage_refusal
from darts_parallel.problem import VOCABULARY_MULTIPLE

FACTORIES = {
    "adam": """\
    name: adamW
    adam_beta1: 0.9
    adam_beta2: 0.95
    adam_eps: 1.0e-08
    torch_adam_is_fused: true""",
    "sgd": """\
    name: sgd""",
}
FILE = """\
general:
  project: darts-parallel
  run: {name}
  seed: 42
parallelism:
  dp: {strategy.dp}
  pp: {plan.pp}
  tp: {strategy.tp}
  expert_parallel_size: 1
  context_parallel_size: {plan.cp}
  pp_engine: 1f1b
  tp_mode: {tp_mode}
  tp_linear_async_communication: {overlap}
  recompute_layer: {recompute}
tokens:
  sequence_length: {training.seq_len}
  micro_batch_size: {micro_batch}
  batch_accumulation_per_replica: {plan.num_micro_batches}
  train_steps: 100
  val_check_interval: -1
optimizer:
  zero_stage: {strategy.zero_stage}
  accumulate_grad_in_fp32: {wide_gradients}
  weight_decay: 0.01
  clip_grad: 1.0
  optimizer_factory:
{factory}
  learning_rate_scheduler:
    learning_rate: 0.0003
    lr_warmup_steps: 10
    lr_warmup_style: linear
    lr_decay_style: cosine
    min_decay_lr: 3.0e-05
model:
  dtype: {dtype}
  init_method:
    std: 0.02
  make_vocab_size_divisible_by: {multiple}
  ddp_bucket_cap_mb: 25
  model_config:
    is_llama_config: true
    hidden_act: silu
    hidden_size: {model.hidden_size}
    intermediate_size: {model.mlp_width}
    num_hidden_layers: {model.num_layers}
    num_attention_heads: {model.num_heads}
    num_key_value_heads: {model.kv_heads}
    max_position_embeddings: {model.max_seq_len}
    tie_word_embeddings: {tied}
    vocab_size: {model.vocab_size}
    bos_token_id: 1
    eos_token_id: 2
    pad_token_id: null
    rms_norm_eps: {epsilon}
    rope_theta: {base}
    use_cache: false
tokenizer:
  tokenizer_name_or_path: {name}
  tokenizer_revision: null
checkpoints:
  checkpoint_interval: 100
  checkpoints_path: checkpoints
data_stages:
- name: training
  start_training_step: 1
  data:
    dataset: null
    num_loading_workers: 1
    seed: 42
"""
"""The written file. Learning rates, steps, tokenizer, checkpoints and data are placeholders."""


EPSILON = 1e-5
ROTARY_BASE = 10000.0
"""nanotron's own `rms_norm_eps` and `rope_theta`, where the model does not say them."""


def export(job: Request) -> Exported:
    """Write `nanotron.yaml`.

    Errors:
        UnsupportedError: nanotron cannot express it.
    """
    strategy = job.uniform()
    _check(job)
    job.settle()
    words = {key: yaml_word(value) for key, value in _words(job, strategy).items()}
    training = job.training
    parts = {"plan": job.plan, "strategy": strategy, "training": training, "model": job.model}
    text = f"{job.headline()}\n" + FILE.format(
        **words, **parts, factory=FACTORIES[training.optimizer]
    )
    notes = [
        "data stages, tokenizer, steps, learning rate and checkpoints are yours: set them",
        "positions are written as rotary in all layers, over whole heads, without scaling",
    ]
    if None in (job.model.norm_epsilon, job.model.rotary_base):
        notes.append(
            "model.norm_epsilon or rotary_base is not given: check rms_norm_eps and rope_theta"
        )
    return Exported({"nanotron.yaml": text}, tuple(notes))


def _check(job: Request) -> None:
    config = job.model
    if config.head_size != config.hidden_size // config.num_heads:
        what = f"model={config.name} has head_dim={config.head_dim}, and its Llama takes another"
        job.refuse(what, "a model with heads of hidden_size / num_heads")
    if why := own_stage_refusal(config, job.plan):
        job.refuse(why, "space=uniform space.pp=1")


def _words(job: Request, strategy: LayerStrategy) -> Entries:
    """Return the values of the file that YAML writes in its own way."""
    training = job.training
    model = job.model
    wide = job.problem.software.summed_bits(training.precision) == 32
    words: Entries = {"name": model.name, "multiple": VOCABULARY_MULTIPLE}
    words["wide_gradients"] = wide
    words["tp_mode"] = "REDUCE_SCATTER" if strategy.sequence_parallel else "ALL_REDUCE"
    words["overlap"] = bool(training.tp_comm_overlap)
    words["recompute"] = job.recompute() == "full"
    words["micro_batch"] = job.micro_batch_size(strategy)
    words["dtype"] = job.word("precision")
    words["tied"] = model.tie_embeddings
    words["epsilon"] = model.norm_epsilon or EPSILON
    words["base"] = model.rotary_base or ROTARY_BASE
    return words
