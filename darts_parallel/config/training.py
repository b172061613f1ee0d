"""Schema of the group `training`: one job."""

from dataclasses import dataclass

from omegaconf import MISSING

from darts_parallel.config.checks import check_fields, one_of, ranged, require
from darts_parallel.config.cluster import PRECISIONS
from darts_parallel.config.rules import check_rules

RECOMPUTE_MODULES = (
    "core_attn",
    "moe_act",
    "layernorm",
    "mla_up_proj",
    "mlp",
    "moe",
    "shared_experts",
)
"""Parts of a block that selective recomputation can name, in Megatron-LM's words."""
UNFUSED = "unfused"
KERNELS = ("fa2", "fa3", "cudnn", "triton", "sdpa", UNFUSED)
"""FlashAttention 2 and 3, cuDNN's, Triton's (PyTorch's flex attention), what
`scaled_dot_product_attention` chooses, and products apart from the softmax."""
OPTIMIZERS = ("adam", "sgd", "adam_bf16_moments", "adam_8bit", "lion", "muon", "adafactor")
PACKINGS = PADDED, PACKED, DYNAMIC = ("padded", "dp_balanced", "default_dynamic_cp")
"""Ways to make micro-batches of sequences of many lengths; the last two are names of Megatron-LM."""
LORA_TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
"""Products of a block that may have an adapter: both of the attention, both of the MLP."""


@dataclass
class TrainingConfig:
    """One training job."""

    global_batch_size: int = ranged(MISSING)
    """Sequences in one optimizer step."""
    seq_len: int = ranged(MISSING)
    """Tokens of one sequence."""
    precision: str = one_of("bf16", PRECISIONS)
    """Number format of the matrix products."""
    optimizer: str = one_of("adam", OPTIMIZERS)
    """Optimizer; its states take memory, and its step takes time."""
    attention_kernel: str | None = one_of(None, KERNELS)
    """FlashAttention 2 or 3, cuDNN's, Triton's, what PyTorch chooses, or no fused one; null: what the
    trainer's files set, else the average of measured runs."""
    tp_comm_overlap: bool | None = None
    """Products overlap the tensor-parallel communication (Megatron-LM's flag of this name); null: as
    the trainer's files set it, else the average of measured runs."""
    compiled: bool | None = None
    """Blocks are compiled (`torch.compile`); null: as the trainer's files set it, else the average of
    measured runs."""
    loss: str | None = one_of(None, ("full", "chunked", "fused"))
    """How the loss is computed. `full`: all logits of a micro-batch exist. `chunked`: an eighth of
    them exists at a time. `fused`: head and loss are one kernel; in Megatron-LM the loss alone is.
    The files for accelerate and DeepSpeed load Liger Kernel for it, whose norms and MLP keep less.
    null: the trainer's files decide; without a trainer it is the average of measured runs."""
    recompute_modules: list[str] = one_of(["core_attn"], RECOMPUTE_MODULES)
    """Modules that selective recomputation computes again (Megatron-LM's `--recompute-modules`).
    torchtitan repeats every second product of dense blocks instead."""
    moe_token_dispatcher_type: str = one_of("alltoall", ("alltoall", "flex"))
    """`alltoall`, or `flex`: a token travels once to every NVLink domain (DeepEP, HybridEP)."""
    moe_load_imbalance: float = ranged(1.1, 1.0, 1e6)
    """Tokens on the busiest expert-parallel rank, divided by the tokens of a rank if balanced. 1: routing
    is forced to balance. Dropless routing measured 1.08 to 1.25 times as long."""
    overlap_moe_expert_parallel_comm: bool = False
    """The experts' all-to-all runs next to another micro-batch's compute (Megatron-LM's flag)."""
    moe_shared_expert_overlap: bool = False
    """Shared experts run next to the all-to-all of the routed ones (Megatron-LM's flag of this
    name)."""
    cuda_graphs: str = one_of("none", ("none", "per_layer", "full_iteration"))
    """`full_iteration`: one recorded graph holds the whole iteration, so that `layer_overhead_us`
    and `expert_overhead_us` are not paid; `per_layer`: one a layer without its routed experts."""
    fp8_dot_product_attention: bool = False
    """Fused attention multiplies in 8 bits (Megatron-LM's flag of this name); with precision fp8,
    mxfp8 or nvfp4."""
    lora_rank: int = ranged(0, 0)
    """Rank of the adapters that alone are trained (LoRA); 0: all weights are."""
    lora_targets: list[str] = one_of(list(LORA_TARGETS), LORA_TARGETS)
    """Products with adapters (Megatron-Bridge's `target_modules`); routed experts have none."""
    lora_dropout: float = ranged(0.0, 0.0, 0.9)
    """Share of an adapter's inputs that are set to 0."""
    frozen_bits: int = one_of(16, (16, 8, 4))
    """Bits of the frozen weights of blocks; products of other precisions cast them every time."""
    gradient_bits: int | None = one_of(None, (16, 32, None))
    """Bits of a gradient when it is accumulated and sent. null: `software` decides, else 16 with
    fp16 and 32 with every other precision, as in Megatron-LM. Its `--grad-reduce-in-bf16` is 16."""
    lengths: str | None = None
    """A histogram of sequence lengths, a CSV file with the columns length and count: plans for the
    expected seconds of its steps (`planner/lengths.py`). A given plan is priced for `seq_len`
    tokens. null: all sequences have `seq_len` tokens."""
    sequence_packing_scheduler: str | None = one_of(None, (*PACKINGS, None))
    """How sequences of many lengths become micro-batches; null: the fastest. `padded`: as long as
    the longest of the micro-batch. Others: packed by Megatron-LM's scheduler of this name."""
    max_seqlen_per_dp_cp_rank: int | None = ranged(None, 1)
    """Tokens of a rank in a packed micro-batch (Megatron-LM's flag); null: the fastest."""
    min_dynamic_context_parallel_size: int = ranged(1, 1)
    """Ranks of the smallest group under dynamic context parallelism, at least (Megatron-LM's
    flag)."""
    dynamic_context_parallel_sizes: str = one_of("powers_of_two", ("powers_of_two", "any"))
    """Sizes of the groups of ranks under dynamic context parallelism. `powers_of_two`: the ranks
    that share gradients must be a power of two, too. `any`: Megatron-LM's PR 6801 (not merged)."""
    software: str | None = None
    """Framework whose measured efficiencies count (a file of conf/software); null: the average of all
    frameworks."""

    @property
    def packings(self) -> tuple[str, ...]:
        """Members of `PACKINGS` that the job allows."""
        asked = self.sequence_packing_scheduler
        return PACKINGS if asked is None else (asked,)

    @property
    def launches(self) -> float:
        """Share of the launch overheads of layers that an iteration pays: 0 in recorded graphs."""
        return float(self.cuda_graphs == "none")

    @property
    def expert_launches(self) -> float:
        """Share of the launch overheads of experts that an iteration pays: 0 with a full graph."""
        return float(self.cuda_graphs != "full_iteration")

    @property
    def fused_attention(self) -> bool:
        """Whether the score matrix never reaches memory."""
        return self.attention_kernel != UNFUSED

    def __post_init__(self) -> None:
        check_fields("training", self)
        check_rules("training", self)
        smallest = self.min_dynamic_context_parallel_size
        setting = f"training.min_dynamic_context_parallel_size={smallest}"
        any_size = self.dynamic_context_parallel_sizes == "any"
        require(any_size or smallest.bit_count() == 1, setting, "be a power of two", 1)
