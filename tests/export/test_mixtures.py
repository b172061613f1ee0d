"""Mixtures of experts in the words of the trainers, and what each of them refuses."""

import json

import pytest

from darts_parallel.errors import ConfigError, UnsupportedError
from darts_parallel.export import export_plan
from darts_parallel.export.mixtures import layer_frequency
from darts_parallel.plans.strategy import LayerStrategy, Plan
from darts_parallel.problem.problem import Problem, load_problem

MIXTRAL = ("model=mixtral_8x22b", "training=mixtral_8x22b", "cluster=h100_16x8")
FOLDED = LayerStrategy(2, 8, 1, sequence_parallel=True, ep=8)


def problem(*overrides: str) -> Problem:
    return load_problem(list(overrides or MIXTRAL))


def plan(problem: Problem, strategy: LayerStrategy, pp: int = 8) -> Plan:
    layers = len(problem.model.layers)
    batch = problem.training.global_batch_size // strategy.dp
    edges = [0, *(1 + (layers - 3) // pp * stage for stage in range(1, pp)), layers]
    return Plan(batch, tuple(edges), (strategy,) * layers)


def files(target: str, problem: Problem, plan: Plan) -> dict[str, str]:
    return export_plan(problem, plan, target).files


def flags(text: str) -> list[str]:
    return [
        line.strip().removeprefix("--") for line in text.splitlines() if line.startswith("    --")
    ]


def test_megatron_has_flags_for_latent_attention_groups_and_parts_to_recompute() -> None:
    job = problem(
        "model=deepseek_v3",
        "training=deepseek_v3",
        "cluster=gb200_nvl72",
        "cluster.nodes.0.count=64",
        "training.moe_token_dispatcher_type=flex",
    )
    strategy = LayerStrategy(1, 64, 1, "selective", ep=64)
    found = set(flags(files("megatron", job, plan(job, strategy, pp=4))["megatron.sh"]))
    wanted = {
        "multi-latent-attention",
        "qk-layernorm",
        "q-lora-rank 1536",
        "kv-lora-rank 512",
        "qk-head-dim 128",
        "qk-pos-emb-head-dim 64",
        "v-head-dim 128",
        'moe-layer-freq "([0]*3+[1]*58)"',
        "moe-router-num-groups 8",
        "moe-router-group-topk 4",
        "moe-router-enable-expert-bias",
        "moe-shared-expert-intermediate-size 2048",
        "moe-flex-dispatcher-backend hybridep",
        "recompute-modules mla_up_proj mlp moe_act",
    }
    assert wanted <= found


@pytest.mark.parametrize("name", ["mixtral_8x7b", "deepseek_v3", "kimi_k2", "llama4_maverick"])
def test_a_frequency_reads_back_as_the_layers_it_names(name: str) -> None:
    config = problem(f"model={name}").config.model
    text = layer_frequency(config)
    read = (
        [int(i % text == 0) for i in range(config.num_layers)]
        if isinstance(text, int)
        else eval(text)
    )
    assert [bool(x) for x in read] == list(config.expert_pattern)


@pytest.mark.parametrize(
    ("target", "strategy", "pp", "words"),
    [
        (
            "torchtitan",
            LayerStrategy(1, 64, 2, ep=4, etp=2),
            1,
            "etp=2, and it has no expert tensor",
        ),
        (
            "deepspeed",
            LayerStrategy(1, 64, 2, ep=4, etp=2),
            1,
            "etp=2 with num_experts=8, and its AutoEP",
        ),
        (
            "deepspeed",
            LayerStrategy(2, 32, 2, ep=4),
            1,
            "tp=2 with num_experts=8, and its AutoEP restores",
        ),
        (
            "deepspeed",
            LayerStrategy(1, 64, 3, ep=4, grad_comm_bits=4),
            1,
            "grad_comm_bits=4 with zero_stage=3",
        ),
        (
            "torchtitan",
            LayerStrategy(1, 64, 0, ep=4),
            1,
            "ep=4 across replicas of the dense weights, and its expert groups",
        ),
        ("nanotron", LayerStrategy(1, 64, 1, ep=4), 1, "num_experts=8"),
    ],
)
def test_what_a_target_lacks_is_refused_by_name(
    target: str, strategy: LayerStrategy, pp: int, words: str
) -> None:
    job = problem("model=mixtral_8x7b", "training=mixtral_8x7b", "cluster=h100_8x8")
    with pytest.raises(UnsupportedError, match=words):
        export_plan(job, plan(job, strategy, pp), target)


def test_experts_of_two_degrees_are_refused() -> None:
    job = problem()
    uneven = plan(job, FOLDED)
    layers = list(uneven.layers)
    layers[5] = LayerStrategy(2, 8, 1, sequence_parallel=True, ep=4)
    mixed = Plan(uneven.num_micro_batches, uneven.boundaries, tuple(layers))
    with pytest.raises(UnsupportedError, match=r"layers.4 has ep=4 and layers.0 has ep=8"):
        export_plan(job, mixed, "megatron")


@pytest.mark.parametrize(
    ("name", "wanted", "missing"),
    [
        (
            "kimi_k2",
            {"score-function sigmoid", "topk-scaling-factor 2.827", "dtype fp32"},
            "pre-softmax",
        ),
        ("nemotron3_nano_30b_a3b", {"enable-expert-bias", "score-function sigmoid"}, "num-groups"),
        ("llama4_maverick", {"score-function sigmoid", "topk 1"}, "enable-expert-bias"),
        ("qwen2_57b_a14b", {"pre-softmax"}, "score-function sigmoid"),
    ],
)
def test_megatron_scores_experts_as_the_model_does(
    name: str, wanted: set[str], missing: str
) -> None:
    job = problem(
        f"model={name}", "training=deepseek_v3", "cluster=h100_16x8", "training.seq_len=2048"
    )
    count = len(job.model.layers)
    whole = Plan(1, (0, count), (LayerStrategy(1, 128, 1, ep=8),) * count)
    found = set(flags(files("megatron", job, whole)["megatron.sh"]))
    assert {f"moe-router-{flag}" for flag in wanted} <= found
    assert f"moe-router-{missing}" not in found


def test_a_bias_of_experts_goes_with_sigmoids() -> None:
    with pytest.raises(
        ConfigError, match=r"score_function=softmax must be sigmoid with .*expert_bias"
    ):
        problem("model=kimi_k2", "model.moe_router_score_function=softmax")


def test_galvatron_reads_the_degrees_of_experts_from_its_json() -> None:
    job = problem("model=mixtral_8x7b", "training=mixtral_8x7b", "cluster=h100_8x8")
    values = json.loads(
        files("galvatron", job, plan(job, LayerStrategy(1, 64, 2, ep=8), pp=1))["galvatron.json"]
    )
    assert values["ep_sizes_enc"] == ",".join(["8"] * 32)
    assert values["tp_of_ep_sizes_enc"] == ",".join(["1"] * 32)
    copies = plan(job, LayerStrategy(8, 1, 2, sequence_parallel=True, ep=4))  # of the experts alone
    values = json.loads(files("galvatron", job, copies)["galvatron.json"])
    assert values["default_dp_type"] == "zero2"


def test_a_router_with_a_bias_of_its_own_is_refused() -> None:
    job = problem(*MIXTRAL, "model.moe_router_bias=true")
    with pytest.raises(UnsupportedError, match="moe_router_bias=true with linear_bias=false"):
        export_plan(job, plan(job, FOLDED), "megatron")
