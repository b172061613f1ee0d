"""Plans that the export tests share; `python -m tests.support.export_plans` writes the golden files."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from darts_parallel.export import export_plan
from darts_parallel.plans.strategy import LayerStrategy, Plan
from darts_parallel.problem.problem import Problem, load_problem

GOLDEN = Path(__file__).parent.parent / "golden" / "export"
TOY = ["model=toy", "cluster=toy", "training=toy"]
LLAMA = [
    *TOY,
    "model.name=toy_llama",
    "model.num_layers=8",
    "model.num_kv_heads=2",
    "model.ffn_hidden_size=96",
    "model.gated_mlp=true",
    "model.learned_positions=false",
    "model.dropout=false",
    "model.linear_bias=false",
    "model.norm_bias=false",
    "model.tie_embeddings=false",
]
MIXTURE = [
    *LLAMA,
    "model.name=toy_mixture",
    "model.num_experts=4",
    "model.moe_router_topk=2",
    "model.moe_ffn_hidden_size=48",
]
LATENT = [
    *MIXTURE,
    "model.name=toy_latent",
    "model.num_kv_heads=null",
    "model.multi_latent_attention=true",
    "model.q_lora_rank=24",
    "model.kv_lora_rank=16",
    "model.qk_nope_head_dim=16",
    "model.qk_rope_head_dim=8",
    "model.v_head_dim=16",
    "model.first_k_dense_replace=1",
    "model.moe_shared_expert_intermediate_size=48",
    "training.recompute_modules=[mla_up_proj,mlp,moe_act]",
]


@cache
def problem_of(overrides: tuple[str, ...]) -> Problem:
    """A problem composed once."""
    return load_problem(list(overrides))


def plan_of(
    problem: Problem, strategy: LayerStrategy, count: int, cuts: Iterable[int] = (), **more: Any
) -> Plan:
    """All layers under one strategy; `cuts` are the layers that begin a further chunk."""
    layers = problem.num_layers
    return Plan(count, (0, *cuts, layers), (strategy,) * layers, **more)


@dataclass(frozen=True)
class ExportCase:
    """A plan with the targets that can express it."""

    overrides: list[str]
    strategy: LayerStrategy
    num_micro_batches: int
    targets: tuple[str, ...]
    cuts: tuple[int, ...] = ()
    cp: int = 1
    virtual_stages: int = 1
    node_order: tuple[int, ...] = ()

    def build(self) -> tuple[Problem, Plan]:
        problem = problem_of(tuple(self.overrides))
        plan = plan_of(
            problem,
            self.strategy,
            self.num_micro_batches,
            self.cuts,
            cp=self.cp,
            virtual_stages=self.virtual_stages,
            node_order=self.node_order,
        )
        return problem, plan


EVERYWHERE = ("megatron", "deepspeed", "accelerate", "galvatron", "torch")
CASES = {
    "uneven_pipeline": ExportCase(
        TOY, LayerStrategy(1, 2, 1), 4, ("megatron", "deepspeed"), (1, 4, 5)
    ),
    "sequence_parallel": ExportCase(
        LLAMA,
        LayerStrategy(2, 2, 1, "full", True),
        4,
        ("megatron", "nanotron", "torchtitan", "torchtitan_0_2"),
        (6,),
    ),
    "interleaved": ExportCase(
        LLAMA,
        LayerStrategy(2, 2, 0),
        4,
        ("megatron", "torchtitan"),
        (3, 5, 7),
        cp=1,
        virtual_stages=2,
    ),
    "inside_nodes": ExportCase(
        LLAMA, LayerStrategy(2, 2, 1), 4, ("megatron",), (6,), node_order=(0, 1, 0, 1)
    ),
    "context": ExportCase(
        LLAMA, LayerStrategy(1, 2, 3), 4, ("torchtitan", "torchtitan_0_2", "accelerate"), cp=4
    ),
    "zero_3": ExportCase(
        LLAMA, LayerStrategy(2, 4, 3, "full"), 2, ("megatron", "accelerate", "galvatron")
    ),
    "zero_2": ExportCase(TOY, LayerStrategy(2, 4, 2, "full"), 2, ("deepspeed", "galvatron")),
    "replicas": ExportCase(TOY, LayerStrategy(1, 8), 2, EVERYWHERE),
    "experts": ExportCase(
        MIXTURE, LayerStrategy(1, 8, 2, ep=4), 2, ("torchtitan", "deepspeed", "galvatron")
    ),
    "experts_folded": ExportCase(
        MIXTURE, LayerStrategy(2, 2, 1, "full", True, ep=2, etp=2), 4, ("megatron",), (6,)
    ),
    "encoder_decoder": ExportCase(
        [*TOY, "model.num_encoder_layers=2"], LayerStrategy(2, 4, 1, "full", True), 2, ("megatron",)
    ),
    "latent_attention": ExportCase(
        LATENT, LayerStrategy(1, 2, 1, "selective", ep=2), 4, ("megatron",), (3, 5, 7)
    ),
}
NAMES = [(name, target) for name, case in CASES.items() for target in case.targets]


def files_of(name: str, target: str) -> dict[str, str]:
    """Return what a case writes for a target, without the plan file next to the program for PyTorch."""
    files = export_plan(*CASES[name].build(), target).files
    return {file: text for file, text in files.items() if file != "train_torch.json"}


def main() -> None:
    """Write the golden files."""
    for name, target in NAMES:
        for file, text in files_of(name, target).items():
            path = GOLDEN / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
