"""Check that plans find what nobody wrote in as a template."""

from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from darts_parallel.graph import PlannedGraph, plan_graph
from darts_parallel.graph.operators import ModuleGraph
from darts_parallel.graph.report import graph_dict, tensor_parallel_plan
from tests.graph.megatron_template import template_plan
from tests.graph.running import mesh, on_meta


# the sizes below are those at which a split pays for the latencies of its collectives
def planned(
    make: Callable[[], nn.Module],
    *shapes: tuple[Any, ...],
    ranks: tuple[int, ...] = (8,),
    **options: Any,
) -> PlannedGraph:
    return plan_graph(on_meta(make, *shapes), mesh(*ranks), **options)


def kinds(plan: PlannedGraph, of: str = "activation") -> Counter[tuple[str, str]]:
    return Counter((c.when, c.step.kind) for c in plan.plan.collectives if c.of == of)


def labels(plan: PlannedGraph, op: str) -> list[str]:
    return [plan.plan.choice(one).labels[0] for one in plan.graph.computing if one.op == op]


class MLP(nn.Module):
    def __init__(self, hidden: int = 2048, factor: int = 4) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, factor * hidden)
        self.down = nn.Linear(factor * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.gelu(self.up(x)))


@cache
def small_mlp() -> ModuleGraph:
    """Capture an MLP whose weights are small next to its many tokens."""
    return on_meta(lambda: MLP(512), (4096, 63, 512))


class QueryAttention(nn.Module):
    """Grouped-query attention with a norm and a residual."""

    def __init__(self, hidden: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, hidden // heads
        self.q = nn.Linear(hidden, hidden, bias=False)
        self.k = nn.Linear(hidden, kv_heads * self.size, bias=False)
        self.v = nn.Linear(hidden, kv_heads * self.size, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.norm = nn.LayerNorm(hidden)

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        h = self.norm(x)
        source = h if other is None else other
        q = self.q(h).unflatten(-1, (self.heads, self.size)).transpose(1, 2)
        k, v = (
            f(source).unflatten(-1, (self.kv_heads, self.size)).transpose(1, 2)
            for f in (self.k, self.v)
        )
        grouped = self.heads != self.kv_heads
        y = functional.scaled_dot_product_attention(
            q, k, v, is_causal=other is None, enable_gqa=grouped
        )
        return x + self.out(y.transpose(1, 2).flatten(2))


def test_megatrons_mlp() -> None:
    plan = planned(MLP, (4, 2048, 2048))
    assert labels(plan, "linear") == ["columns", "inner"]
    assert kinds(plan) == {("forward", "all_reduce"): 1, ("backward", "all_reduce"): 1}
    assert not kinds(plan, "parameter") - Counter({("backward", "all_reduce"): 1})
    assert plan.programme.proven
    assert plan.plan.seconds == pytest.approx(plan.programme.lp_seconds, rel=1e-6)


def test_megatrons_attention_by_heads() -> None:
    plan = planned(lambda: QueryAttention(4096, 32, 32), (2, 2048, 4096))
    assert labels(plan, "scaled_dot_product_attention") == ["heads"]
    assert labels(plan, "linear") == ["columns", "columns", "columns", "inner"]
    moved = kinds(plan)
    one = Counter({("forward", "all_reduce"): 1, ("backward", "all_reduce"): 1})
    both = Counter(
        {(w, k): 1 for w in ("forward", "backward") for k in ("all_gather", "reduce_scatter")}
    )
    assert moved in (one, both)


def test_more_ranks_than_key_value_heads() -> None:
    """Queries split by heads; each rank takes its key-value head out of what all of them have."""
    plan = planned(lambda: QueryAttention(4096, 32, 2), (1, 8192, 4096))
    assert labels(plan, "scaled_dot_product_attention") == ["heads"]
    attention = next(op for op in plan.graph.computing if op.op == "scaled_dot_product_attention")
    assert plan.plan.choice(attention).inputs[:2] == (("S1",), ("R*",))


def test_cross_attention_by_heads() -> None:
    """T5's cross attention: each of the two inputs pays its own backward."""
    plan = planned(lambda: QueryAttention(4096, 32, 32), (2, 2048, 4096), (2, 2048, 4096))
    assert labels(plan, "scaled_dot_product_attention") == ["heads"]
    backward = [c for c in plan.plan.collectives if c.when == "backward" and c.of == "activation"]
    assert "other" in {c.name.removesuffix(".relay") for c in backward}


class Ends(nn.Module):
    def __init__(self, vocabulary: int = 128_000, hidden: int = 1024) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.head(self.table(tokens))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def test_embedding_and_loss_by_vocabulary() -> None:
    """Embedding, tied head and loss split the vocabulary; the loss communicates three numbers a row."""
    plan = planned(Ends, (1, 4096, "long"), (1, 4096, "long"))
    assert labels(plan, "embedding") == ["vocabulary"]
    assert labels(plan, "linear") == ["columns"]
    assert labels(plan, "cross_entropy_loss") == ["vocabulary"]
    assert [c.step.bytes for c in plan.plan.collectives if c.name == "cross_entropy_loss"] == [
        4.0 * 4096
    ] * 3


class PlainBlock(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.attention = QueryAttention(hidden, 16, 16)
        self.norm = nn.LayerNorm(hidden)
        self.mlp = MLP(hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(x)
        return x + self.mlp(self.norm(x))


def test_sequence_parallelism_where_memory_is_tight() -> None:
    """Norms and residuals on the shards, all-gathers and reduce-scatters in the place of all-reduces.

    Readers of one gathered input keep their slice of it, and gather it once more in backward.
    """
    free = planned(lambda: PlainBlock(4096), (4, 2048, 4096), ends="free", memory=100.0)
    assert labels(free, "layer_norm") == ["none", "none"]
    assert kinds(free)["forward", "all_reduce"] == kinds(free)["backward", "all_reduce"] == 2
    used = free.plan.space.memory_bytes(free.plan.assignment) / 2.0**30
    tight = plan_graph(free.graph, mesh(8), ends="free", memory=0.7 * used)
    assert tight.plan.space.memory_bytes(tight.plan.assignment) <= 0.7 * used * 2.0**30
    assert set(labels(tight, "layer_norm")) <= {"d0", "d1"}
    moved = kinds(tight)
    assert moved["forward", "all_gather"] == moved["forward", "reduce_scatter"] == 2
    assert moved["forward", "all_reduce"] == moved["backward", "all_reduce"] == 0
    assert moved["backward", "all_gather"] == 2 + sum(c.again for c in tight.plan.collectives) == 4


class GroupedExperts(nn.Module):
    """GShard's mixture: groups of tokens, a dispatch mask, an expert's two products, a combination."""

    def __init__(self, hidden: int, experts: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(experts, hidden, 4 * hidden))
        self.down = nn.Parameter(torch.empty(experts, 4 * hidden, hidden))

    def forward(self, x: Tensor, dispatch: Tensor) -> Tensor:
        sent = torch.einsum("gsec,gsm->egcm", dispatch, x)
        inner = functional.relu(torch.einsum("egcm,emh->egch", sent, self.up))
        back = torch.einsum("egch,ehm->egcm", inner, self.down)
        return torch.einsum("gsec,egcm->gsm", dispatch, back)


def test_expert_parallelism_with_its_two_all_to_alls() -> None:
    """Groups of tokens split as their data is; experts split; an all-to-all between, each way and pass."""
    plan = planned(lambda: GroupedExperts(4096, 8), (8, 512, 4096), (8, 512, 8, 128), ends="free")
    moved = kinds(plan)
    assert moved["forward", "all_to_all"] == moved["backward", "all_to_all"] == 2
    parameters = (op for op in plan.graph.operators if op.op == "parameter")
    weights = {op.target: plan.plan.choice(op).outputs[0] for op in parameters}
    assert weights == {"up": ("S0",), "down": ("S0",)}


def test_data_parallelism_where_weights_are_small() -> None:
    """A large batch: every operator splits it, and only the weights' gradients are reduced."""
    plan = plan_graph(small_mlp(), mesh(8), ends="free")
    assert set(labels(plan, "linear")) == {"rows0"}
    assert not kinds(plan)
    assert set(kinds(plan, "parameter")) == {("backward", "all_reduce")}


def test_megatrons_template_is_found_or_beaten() -> None:
    """One link for all ranks: the template is the optimum; ranks on two nodes: it is not."""
    plan = planned(lambda: PlainBlock(4096), (2, 2048, 4096))
    template = template_plan(plan.plan.space)
    assert template is not None
    assert template.seconds == pytest.approx(plan.plan.seconds, rel=1e-9)
    assert len(template.collectives) == len(plan.plan.collectives) == 4
    apart = plan_graph(plan.graph, mesh(8, job=["cluster=a10_8x4"]))
    template = template_plan(apart.plan.space)
    assert template is not None
    assert template.seconds > 1.01 * apart.plan.seconds
    assert template_plan(planned(lambda: MLP(64), (8, 8, 64), ranks=(2, 4)).plan.space) is None


def test_two_axes_take_data_and_tensor_parallelism() -> None:
    plan = planned(lambda: MLP(4096), (8, 2048, 4096), ranks=(2, 4), ends="free")
    found = {plan.plan.choice(op).labels for op in plan.graph.computing if op.op == "linear"}
    assert all(any(label.startswith("rows") for label in one) for one in found)
    assert plan.programme.proven


def test_two_axes_split_one_batch_where_weights_are_small() -> None:
    plan = plan_graph(small_mlp(), mesh(2, 4), ends="free")
    found = {plan.plan.choice(op).labels for op in plan.graph.computing if op.op == "linear"}
    assert found == {("rows0", "rows0")}
    assert not kinds(plan)


def test_repeated_blocks_share_their_choice_and_multiply_their_seconds() -> None:
    one = planned(lambda: nn.Sequential(PlainBlock(1024)), (1, 2048, 1024))
    three = planned(lambda: nn.Sequential(*(PlainBlock(1024) for _ in range(3))), (1, 2048, 1024))
    assert three.plan.seconds < 3.0 * one.plan.seconds * (1.0 + 1e-9)
    assert max(len(group.operators) for group in three.plan.space.groups) == 3
    assert len(three.plan.space.groups) <= len(one.plan.space.groups) + 4


def test_the_plan_of_llama_is_the_one_that_comes_with_it() -> None:
    """Two layers of Llama 3 8B on 8 H100: every linear layer has its style of `base_model_tp_plan`."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        num_hidden_layers=2,
        hidden_size=4096,
        intermediate_size=14336,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        use_cache=False,
    )
    found = planned(lambda: transformers.AutoModel.from_config(config), (1, 8192, "long"))
    theirs, ours = config.base_model_tp_plan, tensor_parallel_plan(found)
    assert ours == {name: style for name, style in theirs.items() if name in ours}
    assert {name.rpartition(".")[2] for name in ours} == {
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    }
    data = graph_dict(found)
    assert data["proven"]
    assert data["unknown_operators"] == []
    assert data["tp_plan"] == ours
