"""Model families: what the name of a model says about its blocks where the row does not."""

import re
from dataclasses import dataclass, replace

from experiments.calibration.mixtures import is_mixture
from experiments.calibration.rows import Row, RowError


@dataclass(frozen=True)
class Family:
    """Facts of an architecture, from the papers or the reference code of the models it names."""

    words: str
    """Regular expression on the lower-case model name."""
    gated_mlp: bool = False
    tied: bool = True
    bias: bool = True
    """Linear layers have biases."""
    norm_bias: bool = True
    """LayerNorm, not RMSNorm."""
    learned_positions: bool = True
    dropout: bool = True
    embedding_norm: bool = False
    vocab: int = 50257
    """Where neither the row nor another row of the same model says."""
    causal: bool = True


LLAMA = Family(
    r"llama|mistral|qwen|\byi-|internlm|baichuan|codellama|vicuna|olmo|smollm|deepseek|granite|phi-?3",
    gated_mlp=True, tied=False, bias=False, norm_bias=False, learned_positions=False, dropout=False,
    vocab=32000,
)  # fmt: skip
FAMILIES = (
    replace(LLAMA, words=r"llama-?3", vocab=128256),
    replace(LLAMA, words=r"qwen", vocab=152064),
    replace(LLAMA, words=r"gemma", tied=True, vocab=256000),
    LLAMA,
    Family(r"mpt", bias=False, norm_bias=True, learned_positions=False, dropout=False, vocab=50368),
    Family(r"nemotron", tied=False, bias=False, learned_positions=False, dropout=False, vocab=256000),
    Family(r"bloom", learned_positions=False, dropout=False, embedding_norm=True, vocab=250880),
    Family(r"falcon", bias=False, learned_positions=False, dropout=False, vocab=65024),
    Family(r"neox|pythia", tied=False, learned_positions=False, dropout=False, vocab=50432),
    Family(r"bert", causal=False, vocab=30522),
)  # fmt: skip
GPT = Family("", vocab=51200)
"""GPT-2 and GPT-3 as Megatron-LM trains them; the vocabulary is the padded one of its papers."""
SPARSE = re.compile(r"\bmoe\b|mixture|mixtral|\d+x\d+b|dbrx|deepseek-?v[23]|grok|\bswitch|a\d+b\b")
ENCODER_DECODER = re.compile(r"\bu?t5\b|\bul2\b")


def family_of(row: Row) -> Family:
    """The family that the model's name says, else `GPT`.

    Errors:
        RowError: a kind of model that the cost model does not hold.
    """
    name = row.text("model").lower()
    experts = row.count("ep") or 1
    if is_mixture(row):
        return LLAMA
    if experts > 1 or SPARSE.search(name):
        raise RowError("a mixture of experts whose sizes neither the row nor the model's name says")
    if ENCODER_DECODER.search(name):
        raise RowError("encoder-decoder models need their encoder layers, which the schema does not hold")
    return next((family for family in FAMILIES if re.search(family.words, name)), GPT)


def names_experts(row: Row) -> bool:
    """Whether a row is of a mixture of experts, expressible or not."""
    experts = row.text("n_experts") not in ("", "0", "1")
    return experts or is_mixture(row) or bool(SPARSE.search(row.text("model").lower()))


def gated_by_size(row: Row, family: Family, hidden: int, kv_width: int, ffn: int, vocab: int) -> bool:
    """Whether the MLP is gated: by the family's name, else by which count of parameters is nearer.

    Args:
        kv_width: kv_heads * head_dim.
        ffn: Inner size of the MLP.
    """
    stated = row.number("n_params")
    if family is not GPT or stated is None or stated < 1e6:
        return family.gated_mlp
    layers = row.require("layers")
    attention = 2 * hidden * hidden + 2 * hidden * kv_width
    plain, gated = ((layers * (attention + n * hidden * ffn) + vocab * hidden) for n in (2, 3))
    return abs(gated - stated) < abs(plain - stated)
