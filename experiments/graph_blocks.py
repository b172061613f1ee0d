"""Plan blocks of many models operator by operator, and hold Megatron's template next to them.

    python -m experiments.graph_blocks          # 13 blocks, tp 2, 4, 8, two clusters; needs `hf`
    python -m experiments.graph_blocks blocks=[llama3_8b]

Modules are those of transformers, on the meta device. The template (`megatron_template.py`) splits
columns, then rows; heads; vocabulary; whole experts. The programme chooses what it leaves open, so that it is
the best plan of its kind.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass, field, fields
from itertools import product
from math import nan
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn

from darts_parallel.config import load_config, require_members, run_main
from darts_parallel.graph import (
    DescentOptions,
    capture_module,
    graph_dict,
    make_inputs,
    make_mesh,
    plan_graph,
    summary,
)
from darts_parallel.problem import Cluster
from darts_parallel.report import markdown_table
from experiments.megatron_template import template_plan
from experiments.study import Report, Study, StudyOptions, run_study

FILE = Path(__file__).parent / "data" / "graph_blocks.yaml"
BLOCKS: dict[str, Any] = yaml.safe_load(FILE.read_text("utf-8"))["blocks"]  # type: ignore[no-untyped-call]
MIB = 2**20
CLUSTERS = ("h100_1x8", "a10_8x4")


class Whole(nn.Module):
    """Return the loss of a language model, the last state of another."""

    def __init__(self, name: str, sizes: dict[str, Any]) -> None:
        import transformers

        super().__init__()
        config = getattr(transformers, f"{name}Config")(**sizes, use_cache=False)
        self.seq2seq = name == "T5"
        self.causal = "vocab_size" in dir(config) and name not in ("Bert", "T5")
        kind = transformers.AutoModelForCausalLM if self.causal else transformers.AutoModel
        self.model = kind.from_config(config)

    def forward(self, x: Tensor) -> Tensor:
        """Run the model on itself as labels, or as the decoder's input."""
        more = {}
        if self.causal:
            more["labels"] = x
        elif self.seq2seq:
            more["decoder_input_ids"] = x
        found: Tensor = self.model(x, **more)[0]
        return found


@dataclass
class BlockOptions(StudyOptions):
    """Command line of `python -m experiments.graph_blocks`."""

    blocks: list[str] = field(default_factory=lambda: list(BLOCKS))

    def __post_init__(self) -> None:
        super().__post_init__()
        require_members("blocks", self.blocks, tuple(BLOCKS))


@dataclass(frozen=True)
class BlockRow:
    """Hold one plan and the template's, which has NaN where it does not fit the module."""

    block: str
    operators: int
    capture_s: float
    cluster: str
    tp: int
    search_s: float
    raw_ms: float
    improved_ms: float
    lp_ms: float
    collectives: int
    mib: float
    template_ms: float
    template_collectives: float
    template_mib: float


def plans(block: str) -> list[BlockRow]:
    """Capture a block and plan it on every mesh."""
    entry = BLOCKS[block]
    with torch.device("meta"):
        module = Whole(entry["kind"], entry["sizes"])
        graph = capture_module(module, make_inputs([entry["input"]]))
    rows = []
    for cluster, tp in product(CLUSTERS, (2, 4, 8)):
        config = load_config([f"cluster={cluster}"])
        mesh = make_mesh(Cluster.from_config(config.cluster, "bf16"), (tp,))
        planned = plan_graph(graph, mesh, descent=DescentOptions())
        found = graph_dict(planned)
        own = found["plan"]
        template = template_plan(planned.plan.space)
        other = summary(template) if template else dict.fromkeys(own, nan)
        row: dict[str, Any] = {"operators": len(graph.computing), "capture_s": graph.seconds}
        row["search_s"] = planned.seconds - graph.seconds
        for name in ("raw", "improved", "lp"):
            row[f"{name}_ms"] = 1e3 * found[f"{name}_s"]
        row["collectives"] = own["collectives"]
        row["mib"] = own["bytes"] / MIB
        row["template_ms"] = 1e3 * other["seconds"]
        row["template_collectives"] = other["collectives"]
        row["template_mib"] = other["bytes"] / MIB
        rows.append(BlockRow(block=block, cluster=cluster, tp=tp, **row))
    return rows


def report(rows: Sequence[BlockRow]) -> Report:
    """Return a line a plan."""
    header = [entry.name.replace("_", " ") for entry in fields(BlockRow)]
    cells = [tuple(map(_cell, astuple(row))) for row in rows]
    both = [row.template_ms / row.improved_ms for row in rows if row.template_ms > 0]
    proven = sum(row.improved_ms < row.lp_ms * (1 + 1e-6) for row in rows)
    equal = sum(ratio < 1 + 1e-6 for ratio in both)
    return Report(
        f"{proven} of {len(rows)} plans are proven by the linear programme. Megatron's template is the "
        f"optimum in {equal} of {len(both)}, and takes at worst {max(both, default=1.0):.2f} times as long.",
        markdown_table(header, cells, (0, 3)),
    )


def _cell(value: Any) -> str:
    """Write a value of a row; a dash where there is none."""
    if value != value:
        return "-"
    if isinstance(value, (str, int)):
        return str(value)
    return f"{value:.2f}"


def run(options: BlockOptions) -> int:
    """Plan all blocks; returns the exit status."""
    study = Study(
        "graph_blocks",
        "What does a plan of operators gain over Megatron's template?",
        "overlap of collectives with compute, memory-limited plans, a GPU.",
        plans,
        report,
    )
    return run_study(study, {name: name for name in options.blocks}, options)


if __name__ == "__main__":
    raise SystemExit(run_main("experiments.graph_blocks", __doc__, BlockOptions, run))
