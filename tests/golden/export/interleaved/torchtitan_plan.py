"""torchtitan configuration of a plan, for release 0.3.0 and for main of 2026.

Call it in a config function of the model's config_registry.py, on the configuration of its sizes:
    def planned() -> Trainer.Config:
        return apply_plan(llama3_8b())
"""

# toy_llama on toy, 8 GPUs; written by darts-parallel
# dp 2 · tp 2 · pp 2 × 2 chunks · micro-batch 2 × 4 · ZeRO-0

from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.trainer import Trainer


def apply_plan(config: Trainer.Config) -> Trainer.Config:
    """`config` with the parallelism, token budgets and activation checkpointing of the plan."""
    layers = getattr(getattr(config.model_spec, "model", None), "layers", None)
    if layers is not None and len(layers) != 8:
        raise ValueError(f"{len(layers)} layers, but the plan has 8")
    config.parallelism.data_parallel_replicate_degree = 2
    config.parallelism.data_parallel_shard_degree = 1
    config.parallelism.fsdp_reshard_after_forward = "never"
    config.parallelism.tensor_parallel_degree = 2
    config.parallelism.enable_sequence_parallel = False
    config.parallelism.context_parallel_degree = 1
    config.parallelism.pipeline_parallel_degree = 2
    config.parallelism.pipeline_parallel_schedule = "Interleaved1F1B"
    config.parallelism.module_fqns_per_model_part = [
        ["tok_embeddings", "layers.0", "layers.1"],
        ["layers.2", "layers.3"],
        ["layers.4", "layers.5"],
        ["layers.6", "layers.7", "norm", "lm_head"],
    ]
    config.training.mixed_precision_param = "bfloat16"
    config.training.mixed_precision_reduce = "float32"
    config.training.disable_cuda_graphs = True
    config.compile.enable = False
    config.compile.enable_async_tensor_parallel = False
    config.loss = ChunkedLossWrapper.Config(loss_fn=getattr(config.loss, "loss_fn", config.loss))
    if hasattr(config.training, "num_tokens_per_train_step"):  # main
        config.training.num_tokens_per_microbatch_per_dp_rank = 128
        config.training.num_tokens_per_train_step = 1024
        config.training.max_context_length = 64
        config.parallelism.num_pp_microbatches = 4
    else:  # 0.3.0
        config.training.local_batch_size = 8
        config.training.global_batch_size = 16
        config.training.seq_len = 64
        config.parallelism.pipeline_parallel_microbatch_size = 2
    config.activation_checkpoint = None
    return config
