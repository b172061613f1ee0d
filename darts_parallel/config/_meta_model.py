"""The model that `transformers` builds on the meta device: shapes and matrix products.

Imported where a Hugging Face file is read alone: `transformers` is slow to import, and an extra.
"""

import re
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from inspect import getsource
from typing import Any

import torch
import transformers
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from darts_parallel.config._imported import OWN_FILE, Imported
from darts_parallel.config._model_shapes import (
    HUGGING_FACE,
    HeadShape,
    NotModelled,
    ShapeReader,
)
from darts_parallel.config.model import MAX_SIZE
from darts_parallel.errors import ConfigError, Entries, UnsupportedError

SEQUENCE = 256
"""Tokens of the forward pass that counts matrix products."""
SCANNED = 32
"""Tokens of that pass for models with state spaces, which scan token by token."""
MOST_LAYERS = 1024
"""Layers of `ModelConfig`."""
_LAYERS = re.compile("(num_|n_)?(hidden_|encoder_|decoder_)?layers?")
_WINDOWED = re.compile("sliding|local")


def describe(values: Entries, place: str, name: str) -> Imported:
    """Return the model of a parsed `config.json`; arguments and errors as `import_model`."""
    logging = transformers.utils.logging
    shown = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            whole = _configuration(values, place)
            config = _language_part(whole, values, place)
            try:
                counted = _counted(config, place, name)
                parts = (_not_priced(whole, config, values), _chunks(config))
                counted.fields["not_priced"] = "; ".join(filter(None, parts)) or None
                return counted
            except NotModelled as error:
                why = str(error)
            except Exception as error:  # every class fails in its own way
                why = f"model_type={config.model_type} cannot be counted on the meta device ({_line(error)})"
            raise UnsupportedError(f"{place}: {why}; {OWN_FILE}.")
    finally:
        logging.set_verbosity(shown)


def _configuration(values: Entries, place: str) -> Any:
    """Return the configuration of the whole model."""
    kind = str(values.get("model_type"))
    kind = HUGGING_FACE["other_types"].get(kind, kind)
    if kind not in transformers.CONFIG_MAPPING:
        remote = f"the file's own code{' (auto_map)' if 'auto_map' in values else ''} is not run"
        near = f"a copy with model_type={_closest_type(values)} if its blocks are like that"
        raise ConfigError(
            f"{place}: model_type={kind} is unknown to transformers, and {remote}; try {near}, or a model "
            "file of your own (--config-dir)."
        )
    _require_few_layers(values, place)
    left_out = ("model_type", "auto_map", "quantization_config")
    kept = {key: value for key, value in values.items() if key not in left_out}
    try:
        return transformers.AutoConfig.for_model(kind, **kept)
    except Exception as error:  # every class has its own checks
        raise ConfigError(
            f"{place} is no configuration of model_type={kind} ({_line(error)}); {OWN_FILE}."
        ) from None


def _language_part(config: Any, values: Entries, place: str) -> Any:
    """Return the configuration of the language model: of a multimodal one its `text_config`."""
    text = getattr(config, "text_config", None)
    if isinstance(text, dict) or "text_config" in (values.get("text_config") or {}):
        rule = "must hold the sizes themselves, since its class reads no text_config in that place"
        raise ConfigError(f"{place}: model_type={config.model_type} {rule}; {OWN_FILE}.")
    if text is not None and "tie_word_embeddings" in values:
        text.tie_word_embeddings = values["tie_word_embeddings"]
    if text is None or (_auto_class(text) is None and _auto_class(config) is not None):
        return config
    return text


def _not_priced(whole: Any, text: Any, values: Entries) -> str | None:
    """Name the parts of a file next to its language model, with the parameters of all."""
    names = []
    for key, part in vars(whole).items():
        nested = isinstance(part, transformers.PretrainedConfig) and part is not text
        if nested and key in values:
            names.append(key.removesuffix("_config"))
    if whole is text or not names:
        return None
    shown = " and ".join(names)
    try:
        with torch.device("meta"):
            model = transformers.AutoModel.from_config(whole)
    except Exception:  # every class fails in its own way
        return shown
    others = [m for m in model.children() if type(getattr(m, "config", None)) is not type(text)]
    return f"{shown} ({sum(map(_trained, others)):,} parameters)"


def _chunks(config: Any) -> str | None:
    """Name chunks of attention (Llama 4), which is priced over all tokens."""
    size = getattr(config, "attention_chunk_size", None)
    return f"chunks of attention, above {size:,} tokens" if size else None


def _closest_type(values: Entries) -> str:
    """Return the usual type whose configuration has the most keys of a file."""

    def known(kind: str) -> int:
        return len(transformers.AutoConfig.for_model(kind).to_dict().keys() & values.keys())

    return str(max(HUGGING_FACE["usual_types"], key=known))


def _require_few_layers(values: Entries, place: str) -> None:
    """Refuse numbers of layers that no plan takes, before a list of them fills the memory."""
    parts = [part for part in values.values() if isinstance(part, dict)]
    for key, value in (pair for part in (values, *parts) for pair in part.items()):
        if _LAYERS.fullmatch(key) and isinstance(value, int) and value > MOST_LAYERS:
            raise ConfigError(f"{place}: {key}={value} must be at most {MOST_LAYERS}; {OWN_FILE}.")


def _line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1].strip().rstrip(".")


def _counted(config: Any, place: str, name: str) -> Imported:
    """Build the model, count a forward pass, and read the fields."""
    config.use_cache = False
    config.allow_global_per_layer_attribute_access = True  # read next to the shapes of each block
    model = _build(config)
    config = model.config
    scans = any(hasattr(module, "A_log") for module in model.modules())
    longest = getattr(config, "max_position_embeddings", None) or SEQUENCE
    tokens = min(SCANNED if scans else SEQUENCE, longest)
    flop, order = _forward(model, tokens)
    reader = ShapeReader(model, order)
    found, paths = reader.read()
    blocks = [(path, model.get_submodule(path)) for path in paths]
    sizes = tuple((f"{path} ({type(block).__name__})", _trained(block)) for path, block in blocks)
    fields = {"name": name, **found, **_said(config, found, model)}
    fields |= _heads(reader.head_shapes, fields)
    return Imported(place, fields, _trained(model), flop, tokens, sizes)


def _heads(shapes: list[HeadShape], fields: Entries) -> Entries:
    """Return the heads of blocks without and with a window; nothing where no attention has any.

    Errors:
        NotModelled: blocks of one kind differ.
    """
    if not shapes:
        return {}
    if len(set(shapes)) == 1:
        return asdict(shapes[0])
    pattern = fields.get("sliding_window_pattern") or [0] * len(shapes)
    far, near = (
        {own for own, flag in zip(shapes, pattern, strict=True) if flag == wanted}
        for wanted in (0, 1)
    )
    if len(far) != 1 or len(near) != 1:
        raise NotModelled("its blocks have different heads of keys and values")
    windowed = near.pop()
    return {
        **asdict(far.pop()),
        "window_kv_heads": windowed.num_kv_heads,
        "window_head_dim": windowed.head_dim,
    }


def _trained(module: Any) -> int:
    return sum(p.numel() for p in module.parameters() if p.requires_grad)


class BaseWithHead(torch.nn.Module):
    """The language model of a multimodal class, which has its head elsewhere."""

    def __init__(self, base: Any):
        super().__init__()
        table = base.get_input_embeddings()
        if type(table) is not torch.nn.Embedding:
            raise ValueError("it is no language model")
        self.model = base
        self.config = base.config
        self.get_input_embeddings = base.get_input_embeddings
        self.lm_head = torch.nn.Linear(table.embedding_dim, table.num_embeddings, bias=False)
        if getattr(self.config, "tie_word_embeddings", False):
            self.lm_head.weight = table.weight

    def get_output_embeddings(self) -> torch.nn.Module:
        """Return the head."""
        return self.lm_head

    def forward(self, **inputs: Any) -> Any:
        """Return the logits."""
        return self.lm_head(self.model(**inputs)[0])


def _auto_class(config: Any) -> Any:
    """Return the class that builds the language model of a configuration with its head, or None."""
    kind = type(config)
    translates = kind in transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING
    if config.is_encoder_decoder and translates:
        return transformers.AutoModelForSeq2SeqLM
    decodes = getattr(config, "is_decoder", False)
    if kind in transformers.MODEL_FOR_MASKED_LM_MAPPING and not decodes:
        return transformers.AutoModelForMaskedLM
    if kind in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        return transformers.AutoModelForCausalLM
    return None


def _build(config: Any) -> Any:
    own = _auto_class(config)
    how = {
        "attn_implementation": "eager",
        "experts_implementation": "batched_mm",
        "trust_remote_code": False,
    }
    with torch.device("meta"):
        model = (own or transformers.AutoModel).from_config(config, **how)
        return (model if own else BaseWithHead(model)).eval()


class WholeBatch(TorchFunctionMode):
    """Answer questions to data without values: conditions hold, and no token is padding."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer `bool(tensor)` and `value in tensor`; call everything else."""
        answers = {torch.Tensor.__bool__: True, torch.Tensor.__contains__: False}
        return answers[func] if func in answers else func(*args, **(kwargs or {}))


def _forward(model: Any, tokens: int) -> tuple[float, dict[Any, int]]:
    """Return the FLOP of a pass's matrix products, and the order of the modules' calls.

    Left out is what the priced layers do not count as such: rotary tables; scans, for which the
    cost model has its own formula; the zeros that Llama 4 passes to experts that a token is not
    sent to.
    """
    order: dict[Any, int] = {}

    def called(module: Any, _: Any) -> None:
        order.setdefault(module, len(order))

    for module in model.modules():
        module.register_forward_pre_hook(called)
    counter = FlopCounterMode(display=False)
    with torch.device("meta"), torch.no_grad(), counter, WholeBatch():
        ids = torch.zeros(1, tokens, dtype=torch.long)
        inputs = {"input_ids": ids}
        if model.config.is_encoder_decoder:
            inputs["decoder_input_ids"] = ids
        model(**inputs)
    flop = {path: _products(ops) for path, ops in counter.get_flop_counts().items()}
    total = flop["Global"]
    for path, module in model.named_modules():
        count = flop.get(f"{type(model).__name__}.{path}", 0.0)
        total -= _left_out(module, count, tokens, _top_k(model.config))
    return total, order


def _products(counts: Mapping[Any, int]) -> float:
    """Add the FLOP of matrix products; convolutions are none."""
    return float(sum(count for operation, count in counts.items() if "mm" in str(operation)))


def _left_out(module: Any, count: float, tokens: int, top_k: int | None) -> float:
    """Return the FLOP of a module that priced layers do not have, of `count`."""
    if "Rotary" in type(module).__name__:
        return count
    decays = any(hasattr(part, "A_log") for part in module.children())  # Kimi's gate is a part
    if hasattr(module, "A_log") or (decays and hasattr(module, "conv1d")):
        linear = filter(lambda part: type(part) is torch.nn.Linear, module.modules())
        numbers = sum(part.weight.numel() for part in linear)
        return count - 2.0 * tokens * numbers
    experts = [p for p in module.parameters(recurse=False) if p.dim() == 3]
    if experts and top_k and count == 2.0 * tokens * sum(map(torch.numel, experts)):
        return count * (1.0 - top_k / len(experts[0]))
    return 0.0


def _said(config: Any, found: Entries, model: Any) -> Entries:
    """Return the fields that no shape says: windows, routing, positions, norms, dropout, causality."""
    unused = re.compile("layer_?drop|classifier|summary")
    values = config.to_dict().items()
    rates = [value for key, value in values if "drop" in key and not unused.search(key)]
    dropped = any(isinstance(rate, float) and rate > 0 for rate in rates)
    causal = "MaskedLM" not in type(model).__name__
    said: Entries = {"causal": causal, "dropout": dropped}
    epsilon = _value_of(config, "norm_epsilon")
    said["norm_epsilon"] = epsilon and float(epsilon)
    if not found["learned_positions"]:
        rotary = getattr(config, "rope_parameters", None) or {}
        said["rotary_base"] = rotary.get("rope_theta")
        longest = _value_of(config, "max_seq_len")
        said["max_seq_len"] = min(longest or MAX_SIZE, MAX_SIZE)
    if found.get("num_experts"):
        said |= _routing(config, found["num_experts"], model)
    return said | _windows(config, found["num_layers"], causal)


def _routing(config: Any, num_experts: int, model: Any) -> Entries:
    """Return how the router chooses experts."""
    biased = any("correction_bias" in key for key, _ in model.named_buffers())
    over_chosen = getattr(config, "norm_topk_prob", None) is not False
    factor = getattr(config, "routed_scaling_factor", None)
    said: Entries = {
        "moe_router_topk": _top_k(config) or num_experts,
        "moe_router_enable_expert_bias": biased,
        "moe_router_pre_softmax": not over_chosen and not biased,
    }
    classes = {type(part) for part in model.modules() if "Router" in type(part).__name__}
    source = "".join(map(getsource, classes))
    if "sigmoid" in source and "softmax" not in source:
        said["moe_router_score_function"] = "sigmoid"
    said["moe_router_topk_scaling_factor"] = None if factor in (None, 1) else float(factor)
    groups = getattr(config, "n_group", None) or 1
    if groups > 1:
        said["moe_router_num_groups"] = groups
        said["moe_router_group_topk"] = getattr(config, "topk_group", None) or groups
    return said


def _top_k(config: Any) -> int | None:
    """Return the experts that a token is sent to, the same in every layer; None where layers differ."""
    value = _value_of(config, "moe_router_topk")
    if isinstance(value, list) and len(set(value)) == 1:
        value = value[0]
    return value if isinstance(value, int) else None


def _value_of(config: Any, key: str) -> Any:
    """Return a configuration's value under the first name that it has for a key; None without any."""
    values = (getattr(config, name, None) for name in HUGGING_FACE["keys"][key])
    return next(filter(None, values), None)


def _windows(config: Any, layers: int, causal: bool) -> Entries:
    """Return the size of sliding windows and their layers; nothing if all attend globally.

    Without a causal mask `transformers` gives the tokens on each side, without the query.
    """
    size = _value_of(config, "sliding_window")
    if not isinstance(size, int) or getattr(config, "use_sliding_window", True) is False:
        return {}
    kinds = _value_of(config, "sliding_window_pattern") or ["sliding"] * layers
    flags = [int(bool(_WINDOWED.search(kind))) for kind in kinds]
    if not any(flags) or len(flags) != layers:
        return {}
    return {
        "sliding_window": size if causal else 2 * size + 1,
        "sliding_window_pattern": None if all(flags) else flags,
    }
