"""Settings of one bilevel search, and settings of the main search that it does not serve."""

from dataclasses import asdict, dataclass, field, replace

from darts_parallel.config import LOSSLESS, BilevelConfig, ModelConfig, as_yaml, module_data
from darts_parallel.cost import BLOCK
from darts_parallel.errors import ConfigError, Entries
from darts_parallel.problem import Problem

NUM_SEEDS = 10_000
"""Seeds of searches; retrainings have seeds of their own above them."""
BYTES = 256
"""Vocabulary of the corpus."""


def trainable(problem: Problem) -> ModelConfig:
    """Return the problem's Transformer with as many positions as it trains, if it can be trained here.

    Errors:
        ConfigError: it has experts, an encoder, or heads that share keys.
    """
    config = problem.model.config
    heads = config.num_heads
    own_share = config.hidden_size // heads
    rules = {
        "num_kv_heads": (config.kv_heads, heads),
        "head_dim": (config.head_size, own_share),
        "num_encoder_layers": (config.num_encoder_layers, 0),
        "num_experts": (config.num_experts, None),
    }
    for key, (value, wanted) in rules.items():
        if value != wanted:
            raise ConfigError(
                f"model.{key}={value} must be {wanted}, as one stack of dense blocks is trained "
                f"whose heads share no keys; try {wanted}."
            )
    return replace(config, max_seq_len=problem.training.seq_len)


@dataclass
class BilevelSettings(BilevelConfig):
    """One search: what was configured, the problem's sizes, and the seed."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """Its `max_seq_len` is the length of the sequences."""
    num_devices: int = 8
    """Virtual devices; every layer divides them as `tp * dp`."""
    global_batch_size: int = 16
    """Sequences in one weight step."""
    block_size: int = BLOCK
    """Numbers that share a scale where few bits are sent (`cost.lossy_block`)."""
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for batch in (self.global_batch_size, *self.batch_candidates):
            if batch % self.num_devices:
                near = max(round(batch / self.num_devices), 1) * self.num_devices
                raise ConfigError(
                    f"training.global_batch_size={batch} (or bilevel.batch_candidates) must be a "
                    f"multiple of the {self.num_devices} GPUs; try {near}."
                )

    @staticmethod
    def of(problem: Problem) -> "BilevelSettings":
        """Return the settings of a problem's search.

        Errors:
            ConfigError: the problem is not one that the loop can train.
        """
        config = problem.config.bilevel
        if config is None:
            raise ConfigError("bilevel=null must be set for a bilevel search; try bilevel=default.")
        model = trainable(problem)
        if model.vocab_size != BYTES:
            raise ConfigError(
                f"model.vocab_size={model.vocab_size} must be {BYTES}: the training data are bytes; "
                f"try {BYTES}, or experiment=bilevel."
            )
        job: Entries = {"num_devices": problem.cluster.num_devices}
        job["seed"] = problem.config.search.seed % NUM_SEEDS
        job["global_batch_size"] = problem.training.global_batch_size
        job["block_size"] = problem.config.cost.lossy_block
        return BilevelSettings(**asdict(config), model=model, **job)

    @property
    def num_blocks(self) -> int:
        """Blocks of the Transformer."""
        return self.model.num_layers

    @property
    def context(self) -> int:
        """Tokens of a sequence."""
        return self.model.max_seq_len

    @property
    def batches(self) -> tuple[int, ...]:
        """Global batch sizes that the plan chooses from, rising."""
        return tuple(sorted({self.global_batch_size, *self.batch_candidates}))


UNSEARCHED: dict[str, str] = module_data(__file__)
"""Reasons by key: the loop takes these keys at their default alone."""


def refuse_unsearched(problem: Problem) -> None:
    """Refuse a problem that asks for what the loop does not search.

    Errors:
        ConfigError: names the key, its value and what the loop does instead.
    """
    config = problem.config
    space = config.space
    for key, reason in UNSEARCHED.items():
        owner, _, name = key.rpartition(".")
        section = getattr(config, owner) if owner else config
        value = getattr(section, name)
        legal = getattr(type(section), name)
        # a pin of one value may be a list of it
        if value not in (legal, [legal], (legal,)):
            raise ConfigError(
                f"{key}={as_yaml(value)} is not searched by the bilevel loop: {reason}; try {as_yaml(legal)}."
            )
    for key in ("tp_comm_bits", "grad_comm_bits"):
        pinned = space.pinned(key)
        if pinned is not None and LOSSLESS not in pinned:
            raise ConfigError(
                f"space.{key}={list(pinned)} must hold {LOSSLESS}: layers around the blocks are lossless; "
                f"try {[LOSSLESS, *pinned]}."
            )
