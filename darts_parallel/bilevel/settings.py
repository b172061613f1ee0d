"""Settings of the bilevel search; every field can be set as `key=value` on the command line."""

from dataclasses import dataclass, field, fields
from typing import Any, get_type_hints

from darts_parallel.config import nearest_divisor, require_at_least, require_member
from darts_parallel.errors import ConfigError

ORDERS = ("first", "second")
MIXES = ("collective", "block")
BITS = (16, 8, 4, 2)
POSITIVE = (
    "num_blocks", "width", "num_heads", "context", "num_devices", "global_batch_size", "num_steps",
    "logit_every", "retrain_steps", "validation_sequences", "evaluate_every",
    "trial_every",
)  # fmt: skip
"""Settings that are whole numbers above 0."""


@dataclass(frozen=True)
class TransformerShape:
    """Sizes of the decoder-only Transformer."""

    num_blocks: int = 4
    width: int = 96
    num_heads: int = 4
    context: int = 128
    vocab_size: int = 256

    @property
    def ffn_width(self) -> int:
        """Inner size of the MLP."""
        return 4 * self.width

    @property
    def head_width(self) -> int:
        """Size of one attention head."""
        return self.width // self.num_heads


@dataclass
class BilevelSettings:
    """One search and what is needed to retrain its plan."""

    num_blocks: int = 4
    width: int = 96
    num_heads: int = 4
    context: int = 128
    num_devices: int = 8
    """Virtual devices; every layer divides them as `tp * dp`."""
    tp_degrees: tuple[int, ...] = (1, 2, 4)
    tp_bits: tuple[int, ...] = BITS
    grad_bits: tuple[int, ...] = BITS
    network: str = "slow"
    """Preset of `time_model.NETWORKS`."""
    global_batch_size: int = 16
    """Sequences in one weight step."""
    batch_candidates: tuple[int, ...] = ()
    """Global batch sizes that the plan may choose from; empty: only `global_batch_size`."""
    num_steps: int = 300
    """Weight steps of the search."""
    warmup_steps: int = 60
    """Weight steps before the first logit step."""
    logit_every: int = 2
    """Weight steps between logit steps."""
    retrain_steps: int = 400
    learning_rate: float = 1.5e-3
    """Of the weights. Measured with one seed, context 64, 300 steps: 2.21 nats at 1.5e-3, 2.28 at 3e-3,
    where 2-bit gradients seemed to gain 0.04 nats (0.01 at 1.5e-3): tune it before comparing plans."""
    learning_rate_warmup: int = 20
    """Steps over which the learning rate rises linearly."""
    logit_learning_rate: float = 0.1
    temperature: tuple[float, ...] = (1.0, 1.0)
    """First and last softmax temperature, geometric in between."""
    order: str = "first"
    """`first` takes the weights as given; `second` differentiates through one weight step (DARTS)."""
    mix: str = "collective"
    """Where candidates are mixed: at each all-reduce, or at the output of the whole block."""
    trial_steps: int = 40
    """Weight steps of the trials that measure what compressed gradients cost; 0: by single steps."""
    trial_every: int = 80
    """Weight steps between trials."""
    decay: float = 0.9
    """Of the moving averages behind the noise scale and the progress of compressed gradients."""
    validation_sequences: int = 64
    """Fixed validation batch that curves and final losses are measured on."""
    evaluate_every: int = 20
    seed: int = 0

    def __post_init__(self) -> None:
        for key in POSITIVE:
            require_at_least(key, getattr(self, key), 1)
        for key in ("warmup_steps", "learning_rate_warmup", "trial_steps", "seed"):
            require_at_least(key, getattr(self, key), 0)
        for key in ("learning_rate", "logit_learning_rate"):
            require_at_least(key, getattr(self, key), 0, strict=True)
        if len(self.temperature) != 2 or min(self.temperature) <= 0.0:
            raise ConfigError(f"temperature={self.temperature} must be two numbers above 0: first and last.")
        require_member("order", self.order, ORDERS)
        require_member("mix", self.mix, MIXES)
        for key in ("tp_bits", "grad_bits"):
            for bits in getattr(self, key):
                require_member(key, bits, BITS)
            if BITS[0] not in getattr(self, key):
                raise ConfigError(
                    f"{key}={getattr(self, key)} must hold {BITS[0]}: other layers are lossless."
                )
        for tp in self.tp_degrees:
            _require_divides("tp_degrees", tp, "num_devices", self.num_devices)
            _require_divides("tp_degrees", tp, "num_heads", self.num_heads)
        _require_divides("num_heads", self.num_heads, "width", self.width)
        for batch in (self.global_batch_size, *self.batch_candidates):
            _require_divides("num_devices", self.num_devices, "global batch size", batch)

    @property
    def shape(self) -> TransformerShape:
        """Sizes of the Transformer."""
        return TransformerShape(self.num_blocks, self.width, self.num_heads, self.context)

    @property
    def batches(self) -> tuple[int, ...]:
        """Global batch sizes that the plan chooses from."""
        return self.batch_candidates or (self.global_batch_size,)


def _require_divides(key: str, value: int, whole_key: str, whole: int) -> None:
    if value < 1 or whole % value:
        near = nearest_divisor(whole, max(value, 1))
        raise ConfigError(f"{key}={value} must divide {whole_key}={whole}; nearest legal: {near}.")


@dataclass
class Overrides:
    """`key=value` arguments, checked one by one."""

    values: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def parse(arguments: list[str], schema: type) -> "Overrides":
        """Convert `key=value` texts to the types of the dataclass `schema`.

        Errors:
            ConfigError: an unknown key or a value of the wrong type.
        """
        hints = get_type_hints(schema)
        names = tuple(entry.name for entry in fields(schema))
        values: dict[str, Any] = {}
        for argument in arguments:
            key, _, text = argument.partition("=")
            require_member("key", key, names)
            try:
                values[key] = _convert(text, hints[key])
            except ValueError:
                raise ConfigError(
                    f"{key}={text} must be of type {hints[key]}; see {schema.__name__}."
                ) from None
        return Overrides(values)


def _convert(text: str, kind: Any) -> Any:
    if kind in (int, float, str):
        return kind(text)
    item = kind.__args__[0]
    return tuple(item(part) for part in text.strip("()[]").split(",") if part.strip())
