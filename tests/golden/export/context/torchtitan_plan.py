"""torchtitan configuration of a plan.

Call it in a config function of the model's config_registry.py, on the configuration of its sizes:
    def planned() -> Trainer.Config:
        return apply_plan(llama3_8b())
"""

# toy_llama on toy, 8 GPUs; written by darts-parallel
# dp 2 · tp 1 · cp 4 · pp 1 · micro-batch 2 × 4 · ZeRO-3

from torchtitan.trainer import Trainer


def apply_plan(config: Trainer.Config) -> Trainer.Config:
    """`config` with the parallelism, token budgets and activation checkpointing of the plan."""
    config.parallelism.data_parallel_replicate_degree = 1
    config.parallelism.data_parallel_shard_degree = 2
    config.parallelism.fsdp_reshard_after_forward = "always"
    config.parallelism.tensor_parallel_degree = 1
    config.parallelism.enable_sequence_parallel = False
    config.parallelism.context_parallel_degree = 4
    config.parallelism.pipeline_parallel_degree = 1
    config.training.num_tokens_per_microbatch_per_dp_rank = 128
    config.training.num_tokens_per_train_step = 1024
    config.training.max_context_length = 64
    config.training.mixed_precision_param = "bfloat16"
    config.training.mixed_precision_reduce = "float32"
    config.activation_checkpoint = None
    return config
