"""Further Hugging Face model classes: how each writes its sizes, and its defaults (`transformers` 5.23).

Kept apart from `huggingface_architectures`, which has the reader and the first eight classes. Not modelled,
because neither parameters nor the cost model see it: rotary bases and scaling, residual and logit
multipliers, soft caps, ALiBi; attention and MLP that run in parallel are priced one after the other.
"""

from collections.abc import Callable
from typing import Any

from darts_parallel.config.huggingface_architectures import (
    Reader,
    read_bert,
    read_gpt2,
    read_llama,
    read_mistral,
    read_qwen2,
    read_rotary,
    read_sizes,
    read_t5,
)
from darts_parallel.config.huggingface_classes.windows import windows
from darts_parallel.config.model import MAX_SIZE

Fields = dict[str, Any]


def _phi3(r: Reader) -> Fields:
    dropout = r.positive("resid_pdrop", "embd_pdrop", "attention_dropout")
    return read_rotary(r, dropout=dropout, **windows(r))


def _gemma(r: Reader, **changes: Any) -> Fields:
    bias = r.flag("attention_bias")
    return read_rotary(r, linear_bias=bias, mlp_bias=False if bias else None, **changes)


def _gemma2(r: Reader) -> Fields:
    return _gemma(r, block_norms=4, **windows(r, every=2))


def _gemma3(r: Reader) -> Fields:
    every = r.optional("sliding_window_pattern") or r.optional("_sliding_window_pattern") or 6
    return _gemma(r, block_norms=4, qk_norm=True, **windows(r, every=every))


def _olmo2(r: Reader) -> Fields:
    return _gemma(r, qk_norm=True, qk_norm_whole=True)


def _stablelm(r: Reader) -> Fields:
    normed = r.flag("qk_layernorm")
    return read_rotary(
        r,
        norm_bias=True,
        qkv_bias=True if r.flag("use_qkv_bias") else None,
        qk_norm=normed,
        qk_norm_whole=normed,
        block_norms=1 if r.flag("use_parallel_residual") else None,
        dropout=r.positive("hidden_dropout", "attention_dropout"),
    )


def _starcoder2(r: Reader) -> Fields:
    return read_rotary(
        r,
        gated_mlp=False,
        norm_bias=True,
        linear_bias=r.flag("use_bias"),
        dropout=r.positive("residual_dropout", "embedding_dropout", "attention_dropout"),
        **windows(r),
    )


def _cohere(r: Reader) -> Fields:
    normed = r.flag("use_qk_norm")
    return _gemma(r, block_norms=1, qk_norm=normed, qk_norm_whole=normed)


def _glm4(r: Reader) -> Fields:
    return read_rotary(r, block_norms=4, qkv_bias=True if r.flag("attention_bias") else None)


def _seed_oss(r: Reader) -> Fields:
    flags = {
        "qkv_bias": "attention_bias",
        "attention_output_bias": "attention_out_bias",
        "mlp_bias": "mlp_bias",
    }
    biases = {field: True for field, key in flags.items() if r.flag(key)}
    return read_rotary(r, dropout=r.positive("residual_dropout", "attention_dropout"), **biases)


def _phi(r: Reader) -> Fields:
    return read_rotary(
        r,
        gated_mlp=False,
        norm_bias=True,
        linear_bias=True,
        output_bias=True,
        block_norms=1,
        qk_norm=r.flag("qk_layernorm"),
        dropout=r.positive("resid_pdrop", "embd_pdrop", "attention_dropout"),
    )


def _gptj(r: Reader) -> Fields:
    return read_gpt2(r) | {
        "learned_positions": False,
        "linear_bias": False,
        "mlp_bias": True,
        "output_bias": True,
        "block_norms": 1,
    }


def _falcon(r: Reader) -> Fields:
    heads, parallel = r.integer("num_attention_heads"), r.flag("parallel_attn")
    grouped = r.flag("new_decoder_architecture")
    kv_heads = (r.optional("num_kv_heads") or heads) if grouped else 1 if r.flag("multi_query") else heads
    two_norms = r.optional("num_ln_in_parallel_attn") != 1 if grouped else not parallel
    return {
        **read_sizes(r),
        "num_kv_heads": kv_heads,
        "ffn_hidden_size": r.optional("ffn_hidden_size"),
        "learned_positions": False,
        "linear_bias": r.flag("bias"),
        "block_norms": None if two_norms else 1,
        "dropout": r.positive("hidden_dropout", "attention_dropout"),
    }


def _bloom(r: Reader) -> Fields:
    return {
        "num_layers": r.integer("n_layer"),
        "hidden_size": r.optional("n_embed") or r.integer("hidden_size"),
        "num_heads": r.integer("n_head"),
        "vocab_size": r.integer("vocab_size"),
        "tie_embeddings": r.flag("tie_word_embeddings"),
        "max_seq_len": r.optional("seq_length") or MAX_SIZE,  # ALiBi has no last position
        "learned_positions": False,
        "embedding_norm": True,
        "dropout": r.positive("hidden_dropout", "attention_dropout"),
    }


def _opt(r: Reader) -> Fields:
    h = r.integer("hidden_size")
    if (r.optional("word_embed_proj_dim") or h) != h:
        raise r.refuse(
            f"word_embed_proj_dim={r.optional('word_embed_proj_dim')} beside hidden_size={h}, and embeddings "
            "of another width than the blocks are not modelled",
            str(h),
        )
    if not r.flag("layer_norm_elementwise_affine"):
        raise r.refuse("norms without scale (layer_norm_elementwise_affine=False) are not modelled", "true")
    return {
        **read_sizes(r),
        "ffn_hidden_size": r.integer("ffn_dim"),
        "position_offset": 2,
        "linear_bias": r.flag("enable_bias"),
        "final_norm": r.flag("do_layer_norm_before") and not r.flag("_remove_final_layer_norm"),
        "dropout": r.positive("dropout", "attention_dropout"),
    }


def _roberta(r: Reader) -> Fields:
    """BERT whose positions begin after the padding token's number; `RobertaForMaskedLM`."""
    fields = read_bert(r)
    offset = min(2, fields["max_seq_len"] - 1)
    return {**fields, "max_seq_len": fields["max_seq_len"] - offset, "position_offset": offset}


def _modernbert(r: Reader) -> Fields:
    """`ModernBertForMaskedLM`; its first block has no attention norm, since the embedding's stands there."""
    changes: Fields = {
        "causal": False,
        "gated_mlp": True,
        "linear_bias": r.flag("attention_bias"),
        "mlp_bias": r.flag("mlp_bias"),
        "norm_bias": r.flag("norm_bias"),
        "head_transform": True,
        "output_bias": r.flag("decoder_bias"),
        "dropout": r.positive("attention_dropout", "embedding_dropout", "mlp_dropout"),
    }
    every = r.optional("global_attn_every_n_layers") or 3
    return read_rotary(r, **changes, **windows(r, key="local_attention", every=every, global_first=True))


_SMALL = {"num_hidden_layers": 32, "num_attention_heads": 32}
Read = Callable[[Reader], Fields]
FAMILIES: dict[str, tuple[Read, Fields]] = {
    "phi3": (_phi3, {**_SMALL, "vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192,
                     "max_position_embeddings": 4096}),
    "granite": (read_llama, {**_SMALL, "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
                             "max_position_embeddings": 2048}),
    "smollm3": (read_llama, {"vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 11008,
                             "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 4,
                             "max_position_embeddings": 32768, "tie_word_embeddings": True}),
    "gemma": (_gemma, {"vocab_size": 256000, "hidden_size": 3072, "intermediate_size": 24576,
                       "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 16,
                       "head_dim": 256, "max_position_embeddings": 8192, "tie_word_embeddings": True}),
    "gemma2": (_gemma2, {"vocab_size": 256000, "hidden_size": 2304, "intermediate_size": 9216,
                         "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4,
                         "head_dim": 256, "max_position_embeddings": 8192, "sliding_window": 4096,
                         "tie_word_embeddings": True}),
    "gemma3_text": (_gemma3, {"vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216,
                              "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4,
                              "head_dim": 256, "max_position_embeddings": 131072, "sliding_window": 4096,
                              "tie_word_embeddings": True}),
    "ministral": (read_mistral, {**_SMALL, "vocab_size": 32000, "hidden_size": 4096,
                                 "intermediate_size": 14336, "num_key_value_heads": 8,
                                 "max_position_embeddings": 131072, "sliding_window": 4096}),
    "ministral3": (read_mistral, {"vocab_size": 131072, "hidden_size": 4096, "intermediate_size": 14336,
                                  "num_hidden_layers": 34, "num_attention_heads": 32,
                                  "num_key_value_heads": 8, "head_dim": 128,
                                  "max_position_embeddings": 262144}),
    "mt5": (read_t5, {"vocab_size": 250112, "d_model": 512, "d_kv": 64, "d_ff": 1024, "num_layers": 8,
                      "num_heads": 6, "relative_attention_num_buckets": 32, "dropout_rate": 0.1,
                      "feed_forward_proj": "gated-gelu", "tie_word_embeddings": True}),
    "olmo2": (_olmo2, {**_SMALL, "vocab_size": 50304, "hidden_size": 4096, "intermediate_size": 11008,
                       "max_position_embeddings": 2048}),
    "qwen2_5_vl": (read_qwen2, {"vocab_size": 152064, "hidden_size": 8192, "intermediate_size": 29568,
                                 "num_hidden_layers": 80, "num_attention_heads": 64,
                                 "num_key_value_heads": 8, "max_position_embeddings": 32768,
                                 "sliding_window": 4096, "max_window_layers": 80}),
    "stablelm": (_stablelm, {**_SMALL, "vocab_size": 50304, "hidden_size": 2560, "intermediate_size": 6912,
                             "num_key_value_heads": 32, "max_position_embeddings": 4096}),
    "starcoder2": (_starcoder2, {"vocab_size": 49152, "hidden_size": 3072, "intermediate_size": 12288,
                                 "num_hidden_layers": 30, "num_attention_heads": 24,
                                 "num_key_value_heads": 2, "max_position_embeddings": 4096,
                                 "use_bias": True, "tie_word_embeddings": True}),
    "cohere": (_cohere, {"vocab_size": 256000, "hidden_size": 8192, "intermediate_size": 22528,
                         "num_hidden_layers": 40, "num_attention_heads": 64,
                         "max_position_embeddings": 8192, "tie_word_embeddings": True}),
    "falcon": (_falcon, {"vocab_size": 65024, "hidden_size": 4544, "num_hidden_layers": 32,
                         "num_attention_heads": 71, "multi_query": True, "parallel_attn": True,
                         "max_position_embeddings": 2048, "tie_word_embeddings": True}),
    "bloom": (_bloom, {"vocab_size": 250880, "hidden_size": 64, "n_layer": 2, "n_head": 8,
                       "tie_word_embeddings": True}),
    "opt": (_opt, {"vocab_size": 50272, "hidden_size": 768, "num_hidden_layers": 12, "ffn_dim": 3072,
                   "num_attention_heads": 12, "max_position_embeddings": 2048, "dropout": 0.1,
                   "do_layer_norm_before": True, "enable_bias": True, "layer_norm_elementwise_affine": True,
                   "tie_word_embeddings": True}),
    "gptj": (_gptj, {"vocab_size": 50400, "n_positions": 2048, "n_embd": 4096, "n_layer": 28, "n_head": 16}),
    "phi": (_phi, {"vocab_size": 51200, "hidden_size": 2048, "intermediate_size": 8192,
                   "num_hidden_layers": 24, "num_attention_heads": 32, "max_position_embeddings": 2048}),
    "glm4": (_glm4, {"vocab_size": 151552, "hidden_size": 4096, "intermediate_size": 13696,
                     "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 2,
                     "head_dim": 128, "max_position_embeddings": 131072, "attention_bias": True}),
    "seed_oss": (_seed_oss, {"vocab_size": 155136, "hidden_size": 4096, "intermediate_size": 27648,
                             "num_hidden_layers": 64, "num_attention_heads": 80, "num_key_value_heads": 8,
                             "head_dim": 128, "max_position_embeddings": 524288, "attention_bias": True,
                             "residual_dropout": 0.1, "attention_dropout": 0.1}),
    "modernbert": (_modernbert, {"vocab_size": 50368, "hidden_size": 768, "intermediate_size": 1152,
                                 "num_hidden_layers": 22, "num_attention_heads": 12,
                                 "max_position_embeddings": 8192, "local_attention": 128,
                                 "decoder_bias": True, "tie_word_embeddings": True}),
    "roberta": (_roberta, {"vocab_size": 50265, "hidden_size": 768, "num_hidden_layers": 12,
                           "num_attention_heads": 12, "intermediate_size": 3072,
                           "max_position_embeddings": 512, "type_vocab_size": 2, "hidden_dropout_prob": 0.1,
                           "attention_probs_dropout_prob": 0.1, "tie_word_embeddings": True}),
}  # fmt: skip
"""By `model_type`: how its keys read, and what they are where the file is silent."""
# the language model's own class, and the name of the multimodal one around it
FAMILIES["qwen2_5_vl_text"] = FAMILIES["qwen2_5_vl"]
FAMILIES["gemma3"] = FAMILIES["gemma3_text"]
