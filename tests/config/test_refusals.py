"""Settings that cannot be: each is refused as the problem is loaded, by its key, value and rule."""

import re

import pytest

from darts_parallel.errors import ConfigError
from darts_parallel.problem.problem import load_problem

NODE, RACK, LORA = (
    "cluster=toy_mixed cluster.nodes.1.",
    "cluster=gb200_nvl72 cluster.",
    "training.lora_",
)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("space.schedules=[1f1b,zigzag]", "space.schedules"),
        ("space.schedules=[]", "space.schedules"),
        ("space.offload=[optimizer] space.schedules=[searched]", "space.offload"),
        ("space.schedules=[1f1b] cost=searcher", "cost=analytic"),
        (f"{NODE}count=0", r"nodes\[1\]\.count=0 must be at least 1; try 1"),
        (f"{NODE}device=toy_fst", r"device=toy_fst must be one of .*; try toy_fast\."),
        (
            f"{NODE}price_per_hour_usd=-1",
            r"nodes\[1\]\.price_per_hour_usd=-1 must be at least 0; try 0",
        ),
        ("cluster.nodes.5.count=1", r"cluster\.nodes has, .*; try cluster\.nodes\.0\.count=1\."),
        ("space.node_orders=any", r"space\.node_orders=any must be one of .*; try "),
        ("training.sequence_packing_scheduler=foo", "default_dynamic_cp, null; try null."),
        (f"{RACK}nvlink_domain_gpus=70", "cluster.nvlink_domain_gpus=70 .*try 72"),
        (f"{RACK}nodes.0.nvlink_domain_gpus=3", r"nodes\[0\].nvlink_domain_gpus=3 .*try 4"),
        (f"{RACK}nodes.0.intra_node.shared=true", "nvlink_domain_gpus=72 .*shared=true.*try 4"),
        ("cluster.mtbf_hours_per_gpu=5e4", r"checkpoint_GBps=null must .*try cluster.checkpoint_"),
        ("cluster.mtbf_hours_per_gpu=0", r"mtbf_hours_per_gpu=0 must be at least 0.001; try 0.001"),
        ("cluster.spare_nodes=2", r"spare_nodes=2 must go with cluster.mtbf_hours_per_gpu, .*try"),
        ("objective=goodput", r"objective=goodput must go with cluster.mtbf_hours_per_gpu.*try"),
        ("space.offload=[weights]", "space.offload=weights must be one of activation, optimizer"),
        (
            "space.offload=[activation] cluster.devices.toy.host_bandwidth_GBps=0",
            "host_bandwidth_GBps=0",
        ),
        (
            "space.offload=[activation] search=exact",
            "search.method=exact must go with space.offload=null",
        ),
        ("space.offload=[optimizer] space=executable", "must be null with space.executable=true"),
        ("space.offload=[optimizer] trainer=galvatron", "null with space.trainer=galvatron, or"),
        ("space.offload={weights:1}", "space.offload=weights must be one of activation, optimizer"),
        (
            "space.offload=[optimizer] space.offload={optimizer:0.5}",
            "must be a list or a mapping, as the value before it; try null before it",
        ),
        (
            "training.seq_len=128",
            "be at most model.max_seq_len=64; try 64, or model.max_seq_len=128",
        ),
        ("model.vocab_size=???", r"missing and has no default; try model.vocab_size=32000\."),
        ("training.global_batch_size=0x10", "must be a whole number; try 1"),
        ("space.offload={optimizer:2}", "space.offload.optimizer=2 must be a number from 0 to 1"),
        (
            "space.offload={optimizer:yes}",
            "space.offload.optimizer=yes must be a number from 0 to 1",
        ),
        (
            "space.offload=[optimizer] trainer=deepspeed",
            "or shares that its files set; try {optimizer: 1.0}",
        ),
        (
            "space.offload={optimizer:1} trainer=megatron",
            "or shares that its files set; try null",
        ),
        ("space.schedules={gpipe:1}", "must be null, a value or a list of values, not a mapping"),
        (f"{LORA}rank=-1", r"training.lora_rank=-1 must be at least 0; try 0\."),
        (f"{LORA}rank=100000", r"must be at most \d+; try \d+\."),
        (
            "space.executable=true space.tp_comm_bits=8",
            "bits=8 must be 16 with space.executable=true",
        ),
        (f"{LORA}rank=4 space.executable=true", r"must not go with space.executable, .*try 0\."),
        (f"{LORA}rank=4 cost=searcher", r"must not go with a cost model other.*try 0\."),
        (f"{LORA}rank=4 {LORA}targets=[]", r"must name a product .*\[linear_qkv\]\."),
        (f"{LORA}targets=[query]", "training.lora_targets=query must be one of linear_qkv"),
    ],
)
def test_settings_that_cannot_be_are_refused_in_a_sentence(given: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load_problem(
            [
                "model=toy",
                "training=toy",
                *given.split(),
                *["cluster=toy"][: "cluster=" not in given],
            ]
        )


@pytest.mark.parametrize(
    ("given", "works"),
    [
        ("training.frozen_bits=7", "16"),  # 8 needs LoRA
        ("training.gradient_bits=-1", "16"),
        ("search.temperature=-1", r"\[0.0001, 0.0001\]"),
        ("search.tie=x", "0.2"),
        ("model.kv_lora_rank=0.9", "null"),
        ("model.moe_ffn_hidden_size=1.5", "null"),
    ],
)
def test_a_refusal_proposes_a_value_that_is_not_refused(given: str, works: str) -> None:
    key = given.partition("=")[0]
    with pytest.raises(ConfigError, match=rf"^{re.escape(given)} must .*; try {works}\.$"):
        load_problem(["model=toy", given])
    load_problem(["model=toy", f"{key}={works.replace(chr(92), '')}"])
