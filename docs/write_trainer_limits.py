"""Write `docs/reference/trainer-limits.md`: `python docs/write_trainer_limits.py`.

The first table asks the exporters of the product, the other ones come from `conf/trainer`.
"""

from functools import cache
from pathlib import Path
from typing import Any

import yaml

from darts_parallel.config import EXPORTS
from darts_parallel.export import refusals
from darts_parallel.plans import LayerStrategy, Plan
from darts_parallel.problem import Problem, load_problem

ROOT = Path(__file__).parents[1]
PAGE = Path(__file__).parent / "reference" / "trainer-limits.md"
HEAD = """\
# What each trainer cannot run

`python docs/write_trainer_limits.py` writes this page. With `trainer=NAME` the search leaves out what the
trainer lacks. A plan or a job that has it is refused in a sentence with the reason.

## At a glance

Each cell lists what the written files can say. *-*: nothing but the default. The last row tries some
architectures; others may be written, too. torchtitan needs a configuration of the model's sizes.
The rows of a trainer below name the combinations that it lacks.

"""
DEFAULTS = """
## What the files set, and the price assumes

The value of a key that you leave out. *-*: the files say nothing, so the average of the measured runs counts.

"""
SET = ("attention_kernel", "tp_comm_overlap", "compiled", "loss")
"""Keys of `training` whose null stands for what the trainer's files set."""
ROWS_BELOW = """
## Combinations

A row below holds if all of its settings hold together. *Search instead* is the closest space, or
job, that works. These settings are no keys of the configuration:

| setting | meaning |
| --- | --- |
| `copies` | ranks that hold the same weights: dp × cp, or the replicas of an expert |
| `ep_across_replicas` | ep, where an expert group spans ranks that hold the same dense weights |
| `windowed_heads` | heads of keys and values, where blocks have windows or sinks; else 0 |
| `uneven_heads` | remainder of `windowed_heads` over tp × cp |
| `mamba_layers`, `hybrid_layers` | layers of `model.hybrid_override_pattern`: Mamba layers, or all |
| `offloaded_optimizer` | share of the optimizer state in host memory (`space.offload`) |
| `partly_offloaded` | the same share, if it is below 1 |
"""
COLUMNS = """\
| settings | reason | search instead |
| --- | --- | --- |
"""
COUNTS = {"many": "above 1", "some": "above 0", "none": "0"}
RANKS = 64
"""GPUs of the job that the first table asks about."""
KEYS = {
    "precision": ("bf16", "fp16", "fp32", "fp8", "mxfp8", "nvfp4"),
    "optimizer": ("adam", "sgd", "adam_bf16_moments", "adam_8bit", "lion", "muon", "adafactor"),
    "loss": ("full", "chunked", "fused"),
    "attention_kernel": ("fa2", "fa3", "cudnn", "triton", "sdpa", "unfused"),
    "cuda_graphs": ("per_layer", "full_iteration"),
}
"""Keys of `training` of which every value is asked."""
COMPILED = "training.compiled=true"
LORA = "training.lora_rank=16"
OVERLAP = "training.tp_comm_overlap=true"
FLAGS: dict[str, list[list[str]]] = {
    "`training.compiled=true`": [[COMPILED]],
    "`training.tp_comm_overlap=true`": [[OVERLAP], [OVERLAP, COMPILED]],
    "LoRA": [[LORA]],
    "QLoRA (`training.frozen_bits=4`)": [[LORA, "training.frozen_bits=4"]],
    "optimizer state in host memory": [["space.offload={optimizer: 1.0}"]],
    "cp above 1": [[], ["training.attention_kernel=sdpa"]],
    "HSDP (`space.shard_size`)": [[]],
    "ep above 1": [["model=mixtral_8x7b"]],
}
"""Rows whose cells are yes or no, and the overrides of jobs of which one must be taken."""
STRATEGIES = {"HSDP (`space.shard_size`)": {"shard_size": 8}, "ep above 1": {"ep": 8}}
MODELS = {
    "Llama 2": "llama2_7b",
    "Qwen 3": "llama3_8b model.qk_norm=true",
    "Qwen2-MoE": "qwen2_57b_a14b",
    "Qwen3-MoE": "qwen3_30b_a3b",
    "GPT-2": "gpt2_xl",
    "BERT": "bert_345m",
    "T5": "t5_1_3b",
    "Mixtral": "mixtral_8x7b",
    "DeepSeek-V3": "deepseek_v3",
    "GPT-OSS": "gpt_oss_20b",
    "Gemma 3": "gemma3_27b",
    "Nemotron-H": "nemotron_h_8b",
}


@cache
def job_of(overrides: tuple[str, ...]) -> Problem:
    """Return the job that is asked about."""
    return load_problem(["model=llama3_8b", "cluster=b200_8x", "gbs=128", *overrides])


def taken(overrides: list[str], target: str, cp: int = 1, **strategy: Any) -> bool:
    """Return whether a trainer takes a data-parallel plan of the job under some ZeRO stage."""
    problem = job_of(tuple(overrides))
    layers = problem.num_layers
    plans = [
        Plan(
            1,
            (0, layers),
            (LayerStrategy(1, RANKS // cp, zero_stage=zero, **strategy),) * layers,
            cp=cp,
            offload=((0.0, 1.0),) if any("offload" in text for text in overrides) else (),
        )
        for zero in range("shard_size" in strategy, 4)
    ]
    return any(not refusals(problem, plan, target) for plan in plans)


def listed(words: list[str]) -> str:
    """Return a cell of the first table."""
    return ", ".join(words) or "-"


def glance() -> str:
    """Return the first table."""
    rows = [["", *EXPORTS], ["---"] * (len(EXPORTS) + 1)]
    for key, known in KEYS.items():
        cells = [
            listed([one for one in known if taken([f"training.{key}={one}"], target)])
            for target in EXPORTS
        ]
        rows.append([f"`training.{key}`", *cells])
    for name, jobs in FLAGS.items():
        cp = 2 if name.startswith("cp") else 1
        extra = STRATEGIES.get(name, {})
        cells = []
        for target in EXPORTS:
            takes = any(taken(job, target, cp, **extra) for job in jobs)
            cells.append("yes" if takes else "no")
        rows.append([name, *cells])
    fits = [
        listed([word for word, model in MODELS.items() if taken(f"model={model}".split(), target)])
        for target in EXPORTS
    ]
    rows.append(["models besides Llama 3, for example", *fits])
    return table(rows)


def table(rows: list[list[str]]) -> str:
    """Return rows of cells in Markdown."""
    return "".join(f"| {' | '.join(cells)} |\n" for cells in rows)


def defaults() -> str:
    """Return the table of what the files set of keys that are null."""
    known = {name: abilities(name)["switches"] for name in EXPORTS}
    keys = [key for key in SET if any(key in own for own in known.values())]
    rows = [["key of `training`", *EXPORTS], ["---"] * (len(EXPORTS) + 1)]
    for key in keys:
        cells = [str(own.get(key, ["-"])[0]).lower() for own in known.values()]
        rows.append([f"`{key}`", *cells])
    return table(rows)


def abilities(name: str) -> dict[str, Any]:
    """Return the record of a trainer in `conf/trainer`."""
    text = (ROOT / "conf" / "trainer" / f"{name}.yaml").read_text(encoding="utf-8")
    found: dict[str, Any] = yaml.safe_load(text)["trainer"]  # type: ignore[no-untyped-call]
    return found


def values(given: Any) -> str:
    """Return the values of a setting in words."""
    if isinstance(given, str):
        return COUNTS[given]
    return " or ".join("null" if one is None else str(one).lower() for one in given)


def row(lack: dict[str, Any]) -> str:
    """Return the line of a combination."""
    shown = [f"`{key}` {values(given)}" for key, given in lack.get("when", {}).items()]
    shown += [f"`model.{key}` not {values(given)}" for key, given in lack.get("model", {}).items()]
    settings = (" or " if "model" in lack else ", ").join(shown)
    why = lack["why"].removeprefix("and ")
    return f"| {settings} | {why} | `{lack['instead']}` |"


def page() -> str:
    """Return the text of the page."""
    parts = [HEAD + glance() + DEFAULTS + defaults() + ROWS_BELOW]
    for name in EXPORTS:
        lines = "\n".join(map(row, abilities(name).get("lacks", [])))
        parts.append(f"## {name}\n\n{COLUMNS}{lines}\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
