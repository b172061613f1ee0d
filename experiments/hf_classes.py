"""Which classes of transformers does model=hf read? Parameters and FLOP are compared on the meta device.

    python -m experiments.hf_classes                      # all classes, about 6 minutes
    python -m experiments.hf_classes only=[gpt2,llama]    # two of them

Every causal and sequence-to-sequence class is built from its default configuration. It is accepted where
parameters and matrix-product FLOP of the priced layers equal those of the class.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import transformers
from transformers.models.auto import modeling_auto as auto

from darts_parallel.config import OWN_FILE, import_model, require_members, run_main
from darts_parallel.errors import DartsParallelError
from darts_parallel.problem import check_import
from darts_parallel.report import markdown_table
from experiments.study import Report, Study, StudyOptions, run_study

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
SIZES: dict[str, dict[str, object]] = {
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {
        "n_routed_experts": 32,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "n_group": 1,
        "topk_group": 1,
    },
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "ministral": {"head_dim": 128},
    "nemotron": {"head_dim": 128, "num_key_value_heads": 8},
}
"""Sizes that published files of these classes give and their default configurations lack."""
CAUSAL = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
SEQ_TO_SEQ = auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
CLASSES = tuple(sorted({*CAUSAL, *SEQ_TO_SEQ}))
LONGEST_REASON = 160
"""Characters of a refusal that the table shows."""


@dataclass
class HfClassesOptions(StudyOptions):
    """Command line of `python -m experiments.hf_classes`."""

    only: list[str] = field(default_factory=list)
    """Model types; none: all."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_members("only", self.only, CLASSES)


@dataclass(frozen=True)
class ClassRead:
    """Outcome of reading one class."""

    model_type: str
    refusal: str
    """Reason for a refusal; empty where the class is accepted."""


def read_class(model_type: str) -> list[ClassRead]:
    """Read the default configuration of a class."""
    values = {"model_type": model_type, **SIZES.get(model_type, {})}
    try:
        check_import(import_model(values, model_type, model_type))
    except DartsParallelError as error:
        reason = str(error).removesuffix(f"; {OWN_FILE}.").removeprefix(f"{model_type}: ")
        return [ClassRead(model_type, reason)]
    return [ClassRead(model_type, "")]


def refused_part(row: ClassRead) -> str:
    """Name the class of the module that a refusal names in brackets."""
    found = re.search(r"\(([A-Z]\w+)\)", row.refusal)
    return found.group(1) if found else "no single part"


def report(rows: Sequence[ClassRead]) -> Report:
    """Count the accepted classes, and list the others with the reason."""
    accepted = [row.model_type for row in rows if not row.refusal]
    refused = [row for row in rows if row.refusal]
    parts = Counter(refused_part(row) for row in refused)
    counts = ", ".join(f"{part} ({count})" for part, count in sorted(parts.items()))
    note = (
        f"{len(accepted)} of {len(rows)} model types of transformers {transformers.__version__} "
        f"are accepted (sizes added where a default is incomplete: {', '.join(SIZES)}): "
        f"{', '.join(accepted)}."
    )
    lines = [(row.model_type, row.refusal.replace("|", "/")[:LONGEST_REASON]) for row in refused]
    return Report(
        note,
        f"Refused by part: {counts}." if counts else "",
        markdown_table(("refused", "why"), lines, left=(0, 1)) if lines else "",
    )


def run(options: HfClassesOptions) -> int:
    """Read all classes; returns the exit status."""
    study = Study(
        "hf_classes",
        "Which classes of transformers does model=hf read?",
        "forms of a class that its default configuration lacks; every file is checked when it is read.",
        read_class,
        report,
    )
    wanted = options.only or CLASSES
    return run_study(study, {model_type: model_type for model_type in wanted}, options)


if __name__ == "__main__":
    raise SystemExit(run_main("experiments.hf_classes", __doc__, HfClassesOptions, run))
