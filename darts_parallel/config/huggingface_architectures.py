"""How each Hugging Face model class writes its sizes, and its defaults.

The defaults of missing keys are those of the configuration classes of `transformers` 4.5x
(`LlamaConfig`, `GPT2Config`, ...), which write only what differs from them into some files.
Not modelled, because neither parameters nor the cost model see it: rotary bases and scaling, parallel
attention and MLP (GPT-NeoX's collectives are priced as two).
"""

from collections.abc import Callable
from typing import Any

from darts_parallel.config.huggingface_classes.windows import windows
from darts_parallel.config.model import MAX_SIZE
from darts_parallel.errors import ConfigError, UnsupportedError


class Reader:
    """The keys of one `config.json`, with the defaults of its class."""

    def __init__(self, values: dict[str, Any], defaults: dict[str, Any], place: str):
        self._values = {**defaults, **values}
        self._place = place

    @property
    def place(self) -> str:
        """Name of the file, for messages."""
        return self._place

    def value(self, key: str) -> Any:
        """Whatever the file says; None where it says nothing."""
        return self._values.get(key)

    def whole(self, key: str) -> int:
        """A whole number of at least 0; nothing counts as 0."""
        value = self._values.get(key) or 0
        if type(value) is not int or value < 0:
            raise ConfigError(f"{self._place}: {key}={value!r} must be a whole number of at least 0; try 0.")
        return value

    def optional(self, key: str) -> int | None:
        """A whole number above 0, or None where the file says null or nothing."""
        value = self._values.get(key)
        if value is None:
            return None
        if type(value) is not int or value < 1:
            raise ConfigError(f"{self.place}: {key}={value!r} must be a whole number above 0; try 1.")
        return value

    def count(self, key: str) -> int:
        """A whole number, 0 where the file says null or nothing."""
        return 0 if self._values.get(key) == 0 else self.optional(key) or 0

    def integer(self, key: str) -> int:
        """A whole number above 0.

        Errors:
            ConfigError: another value, or none.
        """
        value = self.optional(key)
        if value is None:
            raise ConfigError(f"{self.place}: {key} is missing and has no default; try a whole number.")
        return value

    def flag(self, key: str, *, default: bool = False) -> bool:
        """True or false; null counts as false, a missing key as `default`."""
        value = self._values.get(key, default)
        if value is not None and not isinstance(value, bool):
            raise ConfigError(f"{self.place}: {key}={value!r} must be true or false; try false.")
        return bool(value)

    def text(self, key: str) -> str:
        """A word."""
        return str(self._values.get(key) or "")

    def words(self, key: str) -> list[str] | None:
        """A list of words, or None where the file says null or nothing."""
        value = self._values.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
            raise ConfigError(f"{self.place}: {key}={value!r} must be a list of words; try null.")
        return value

    def positive(self, *keys: str) -> bool:
        """Whether one of the rates is above 0."""
        values = [self._values.get(key) or 0.0 for key in keys]
        for key, value in zip(keys, values, strict=True):
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise ConfigError(f"{self.place}: {key}={value!r} must be a number; try 0.0.")
        return any(value > 0 for value in values)

    def refuse(self, what: str, near: str) -> UnsupportedError:
        """The error that names what the model has and this version lacks."""
        return UnsupportedError(f"{self.place}: {what}; try {near}.")


def read_sizes(r: Reader) -> dict[str, Any]:
    """Sizes under the keys that most classes have."""
    return {
        "num_layers": r.integer("num_hidden_layers"),
        "hidden_size": r.integer("hidden_size"),
        "num_heads": r.integer("num_attention_heads"),
        "vocab_size": r.integer("vocab_size"),
        "tie_embeddings": r.flag("tie_word_embeddings"),
        "max_seq_len": r.integer("max_position_embeddings"),
    }


def read_rotary(r: Reader, **changes: Any) -> dict[str, Any]:
    """A decoder with RMSNorm, gated MLP and rotary positions: Llama and its kin."""
    return {
        **read_sizes(r),
        "num_kv_heads": r.optional("num_key_value_heads"),
        "head_dim": r.optional("head_dim"),
        "ffn_hidden_size": r.integer("intermediate_size"),
        "gated_mlp": True,
        "learned_positions": False,
        "dropout": False,
        "linear_bias": False,
        "norm_bias": False,
        **changes,
    }


def read_llama(r: Reader) -> dict[str, Any]:
    """Llama and what has its keys; attention and MLP have biases each on their own."""
    attention, mlp = r.flag("attention_bias"), r.flag("mlp_bias")
    return read_rotary(r, linear_bias=attention, mlp_bias=None if mlp == attention else mlp)


def read_mistral(r: Reader) -> dict[str, Any]:
    """Llama without biases, some layers in a sliding window."""
    return read_rotary(r, **windows(r))


def read_qwen2(r: Reader) -> dict[str, Any]:
    """Biases of queries, keys and values; windows from a layer on, where they are used at all."""
    return read_rotary(
        r, qkv_bias=True, **windows(r, only_if="use_sliding_window", first="max_window_layers")
    )


def _qwen3(r: Reader) -> dict[str, Any]:
    bias = r.flag("attention_bias")
    found = windows(r, only_if="use_sliding_window", first="max_window_layers")
    return read_rotary(r, qk_norm=True, linear_bias=bias, mlp_bias=False if bias else None, **found)


def read_gpt2(r: Reader) -> dict[str, Any]:
    """Sizes under the short keys of GPT-2 (`n_layer`, `n_embd`), which others have taken over."""
    return {
        "num_layers": r.integer("n_layer"),
        "hidden_size": r.integer("n_embd"),
        "num_heads": r.integer("n_head"),
        "ffn_hidden_size": r.optional("n_inner"),
        "vocab_size": r.integer("vocab_size"),
        "tie_embeddings": r.flag("tie_word_embeddings"),
        "max_seq_len": r.integer("n_positions"),
        "dropout": r.positive("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    }


def _gpt_neox(r: Reader) -> dict[str, Any]:
    bias = r.flag("attention_bias")
    return {
        **read_sizes(r),
        "linear_bias": bias,
        "mlp_bias": None if bias else True,
        "ffn_hidden_size": r.integer("intermediate_size"),
        "learned_positions": False,
        "dropout": r.positive("hidden_dropout", "attention_dropout"),
    }


def read_bert(r: Reader) -> dict[str, Any]:
    """The encoder with its masked-language head (`BertForMaskedLM`): no pooler, no sentence head."""
    return {
        **read_sizes(r),
        "ffn_hidden_size": r.integer("intermediate_size"),
        "causal": False,
        "dropout": r.positive("hidden_dropout_prob", "attention_probs_dropout_prob"),
        "embedding_norm": True,
        "final_norm": False,
        "head_transform": True,
        "output_bias": True,
        "token_types": r.optional("type_vocab_size") or 0,
    }


def read_t5(r: Reader) -> dict[str, Any]:
    """Fields of T5 and mT5.

    Files of transformers 5 always say `tie_word_embeddings=true`; what tells an untied head
    there is that the decoder's outputs are not scaled (`T5Config`).
    """
    encoder = r.integer("num_layers")
    tied = r.flag("tie_word_embeddings") and r.flag("scale_decoder_outputs", default=True)
    return {
        "num_layers": encoder + (r.optional("num_decoder_layers") or encoder),
        "num_encoder_layers": encoder,
        "hidden_size": r.integer("d_model"),
        "num_heads": r.integer("num_heads"),
        "head_dim": r.integer("d_kv"),
        "ffn_hidden_size": r.integer("d_ff"),
        "gated_mlp": r.text("feed_forward_proj").startswith("gated-"),
        "vocab_size": r.integer("vocab_size"),
        "tie_embeddings": tied,
        "max_seq_len": MAX_SIZE,  # relative positions: every distance has a bucket
        "learned_positions": False,
        "dropout": r.positive("dropout_rate"),
        "linear_bias": False,
        "norm_bias": False,
        "relative_position_buckets": r.integer("relative_attention_num_buckets"),
    }


_LLAMA = {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
          "num_attention_heads": 32, "max_position_embeddings": 2048}  # fmt: skip
_QWEN = {**_LLAMA, "vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32,
         "max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28}  # fmt: skip
ARCHITECTURES: dict[str, tuple[Callable[[Reader], dict[str, Any]], dict[str, Any]]] = {
    "llama": (read_llama, _LLAMA),
    "mistral": (
        read_mistral,
        {**_LLAMA, "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072,
         "sliding_window": 4096},
    ),
    "qwen2": (read_qwen2, _QWEN),
    "qwen3": (_qwen3, {**_QWEN, "head_dim": 128}),
    "gpt2": (
        read_gpt2,
        {"vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12,
         "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1, "tie_word_embeddings": True},
    ),
    "gpt_neox": (
        _gpt_neox,
        {"vocab_size": 50432, "hidden_size": 6144, "num_hidden_layers": 44, "num_attention_heads": 64,
         "intermediate_size": 24576, "max_position_embeddings": 2048, "attention_bias": True},
    ),
    "bert": (
        read_bert,
        {"vocab_size": 30522, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
         "intermediate_size": 3072, "max_position_embeddings": 512, "type_vocab_size": 2,
         "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1, "tie_word_embeddings": True},
    ),
    "t5": (
        read_t5,
        {"vocab_size": 32128, "d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8,
         "relative_attention_num_buckets": 32, "dropout_rate": 0.1, "feed_forward_proj": "relu",
         "tie_word_embeddings": True},
    ),
}  # fmt: skip
"""By `model_type`: how its keys read, and what they are where the file is silent."""
