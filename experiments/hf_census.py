"""Count the causal and sequence-to-sequence classes of `transformers` that `model=hf` reads rightly.

Every class is built from its default configuration on the meta device, and accepted where parameters and
matrix-product FLOP of the priced layers are those of the class.
"""

import re
from collections import Counter

import transformers
from transformers.models.auto import modeling_auto as auto

from darts_parallel.config import OWN_FILE, import_model
from darts_parallel.errors import DartsParallelError
from darts_parallel.problem import check_import
from experiments.results_page import publish

ROUTED = {"n_routed_experts": 32, "n_shared_experts": 1, "num_experts_per_tok": 4, "n_group": 1}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
SIZES: dict[str, dict[str, object]] = {
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {**ROUTED, "topk_group": 1},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "ministral": {"head_dim": 128},
    "nemotron": {"head_dim": 128, "num_key_value_heads": 8},
}
"""Sizes that files of these classes give and their defaults lack."""


def refusal(kind: str) -> str:
    """Return why a class is refused; nothing where it is accepted."""
    try:
        check_import(import_model({"model_type": kind, **SIZES.get(kind, {})}, kind, kind))
    except DartsParallelError as error:
        return str(error).removesuffix(f"; {OWN_FILE}.").removeprefix(f"{kind}: ")
    return ""


def main() -> None:
    """Write the page."""
    kinds = {*auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES}
    found = {kind: refusal(kind) for kind in sorted(kinds)}
    right = [kind for kind, why in found.items() if not why]
    names = (re.search(r"\(([A-Z]\w+)\)", why) for why in found.values() if why)
    parts = Counter(name.group(1) if name else "no single part" for name in names)
    rows = [f"| {kind} | {why.replace('|', '/')[:160]} |" for kind, why in found.items() if why]
    text = "\n".join([
        f"{len(right)} of {len(found)} model types of transformers {transformers.__version__} are accepted "
        f"(sizes added where a default is incomplete: {', '.join(SIZES)}): {', '.join(right)}.", "",
        "Refused by part: " + ", ".join(f"{part} ({n})" for part, n in sorted(parts.items())) + ".", "",
        "| refused | why |", "| --- | --- |", *rows,
    ])  # fmt: skip
    limits = "forms of a class that its default configuration lacks; every file is checked when it is read."
    question = "Which classes of transformers does model=hf read?"
    publish("hf_classes", question, "python -m experiments.hf_census", text, limits=limits)


if __name__ == "__main__":
    main()
