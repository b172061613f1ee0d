"""Plain PyTorch: one script for torchrun, `torch_program.py` with the plan and the model written into it."""

from itertools import pairwise
from pathlib import Path
from pprint import pformat
from typing import Any

from darts_parallel.export.common import BLOCKS, Exported, Request
from darts_parallel.export.mixtures import require_dense
from darts_parallel.plan import LayerStrategy

PLACE = "PLAN: dict[str, Any] = {}\n"
"""The line of the program that the plan takes."""
IMPORT = "from darts_parallel.export.torch_model import Block, Embedding, Head\n\n"
MODEL = "class Embedding("
"""First line of what takes the place of the import: the program needs no other file."""
UNLIKE = ("head_transform", "embedding_norm", "output_bias", "qk_norm")
"""Settings that the program's model lacks."""


def export(job: Request) -> Exported:
    """The program `train_torch.py`.

    Errors:
        UnsupportedError: the program cannot run it.
    """
    require_dense(job)
    job.require_one_stack()
    strategy = job.uniform()
    _check(job)
    job.settle()
    text = _program()
    head = "\n".join(job.headline())
    values = pformat(settings(job, strategy), width=100, sort_dicts=False)
    plan = f"PLAN: dict[str, Any] = {values}\n"
    summary, program = text.split('"""\n\n', 1)
    return Exported(
        {"train_torch.py": f'{summary}"""\n\n{head}\n\n{program.replace(PLACE, plan)}'},
        (
            "the tokens are random: write your own batch(); tied tables are two copies kept equal",
            "rotary angles have the base 10000, in PLAN['model']['rotary_base']: set your model's",
        ),
    )


def _program() -> str:
    """The program with its model, before its first function."""
    program, model = (
        Path(__file__).with_name(name).read_text(encoding="utf-8")
        for name in ("torch_program.py", "torch_model.py")
    )
    before, after = program.replace(IMPORT, "").split("\n\ndef ", 1)
    return f"{before}\n\n{model[model.index(MODEL) :]}\n\ndef {after}"


def _check(job: Request) -> None:
    config = job.model
    wrong = [name for name in UNLIKE if getattr(config, name)]
    wrong += [name for name in ("final_norm",) if not getattr(config, name)]
    wrong += [name for name in ("token_types", "relative_position_buckets") if getattr(config, name)]
    if wrong:
        job.refuse(
            f"model={config.name} has its own {', '.join(wrong)}, which the program's model lacks",
            "a model such as model=gpt2_xl or model=llama3_8b",
        )
    precision = job.problem.training.precision
    if precision not in ("bf16", "fp32"):
        why = "does not scale its loss" if precision == "fp16" else "multiplies in 16 bits at least"
        job.refuse(f"training.precision={precision}, and the program {why}", "training.precision=bf16")


def settings(job: Request, strategy: LayerStrategy) -> dict[str, Any]:
    """Return the settings that the program reads; `parts` count embedding, blocks and head."""
    plan, config, training = job.plan, job.model, job.problem.training
    kinds = [layer.kind for layer in job.problem.model.layers]
    head = kinds.index("head")
    parts = [[min(first, head + 1), min(end, head + 1)] for first, end in pairwise(plan.boundaries)]
    pairs = enumerate(zip(kinds, plan.layers, strict=True))
    return {
        "pp": plan.pp,
        "dp": strategy.dp,
        "tp": strategy.tp,
        "sequence_parallel": strategy.sequence_parallel,
        "zero_stage": strategy.zero_stage,
        "num_micro_batches": plan.num_micro_batches,
        "parts": parts,
        "recomputed": [i for i, (kind, s) in pairs if kind in BLOCKS and s.recompute == "full"],
        "global_batch_size": training.global_batch_size,
        "seq_len": training.seq_len,
        "precision": training.precision,
        "optimizer": training.optimizer,
        "model": {
            "num_layers": config.num_layers,
            "hidden_size": config.hidden_size,
            "num_heads": config.num_heads,
            "num_kv_heads": config.num_kv_heads or config.num_heads,
            "head_dim": config.head_dim or config.hidden_size // config.num_heads,
            "ffn_hidden_size": config.ffn_hidden_size or 4 * config.hidden_size,
            "gated_mlp": config.gated_mlp,
            "vocab_size": config.vocab_size,
            "max_seq_len": config.max_seq_len,
            "learned_positions": config.learned_positions,
            "rotary_base": 10000.0,
            "causal": config.causal,
            "linear_bias": config.linear_bias,
            "qkv_bias": config.linear_bias if config.qkv_bias is None else config.qkv_bias,
            "norm_bias": config.norm_bias,
            "tie_embeddings": config.tie_embeddings,
        },
    }
