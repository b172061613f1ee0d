"""Refusals of the command: one sentence, exit status 2, nothing left behind."""

import pytest
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from darts_parallel.config.composition import to_config
from darts_parallel.config.schema import config_dir, register_schema
from darts_parallel.errors import DartsParallelError
from darts_parallel.plans.space import outer_spaces
from darts_parallel.problem.problem import Problem
from tests.support.commands import TOY, Command

REFUSED = [
    # misspelt keys and groups
    ("modle=toy", "modle=toy", "try model."),
    ("model=tooy", "model=tooy", "try toy, or model=hf"),
    ("model.num_layer=3", "model.num_layer=3 is not a key", "try model.num_layers."),
    (
        "cluster.inter_node.bandwith_GBps=10",
        "is not a key",
        "try cluster.inter_node.bandwidth_GBps.",
    ),
    (
        "cluster.nodes.0.intra_node.latency_ms=3",
        "is not a key",
        "try cluster.nodes.0.intra_node.latency_us.",
    ),
    (
        "cluster.inter_node.bandwidth_GBps=4e11",
        "cluster.inter_node.bandwidth_GBps=4e+11",
        "try 1e+06",
    ),
    ("model.foo.bar=3", "model.foo.bar=3 is not a key", "try model."),
    ("+model.num_layer=3", "model.num_layer=3 is not a key", "try model.num_layers."),
    ("++model.foo.bar=3", "model.foo.bar=3 is not a key", "try model."),
    ("search.num_step=3", "search.num_step=3", "try search.num_steps."),
    ("search.lr=0.1", "search.lr=0.1", "try search.learning_rate."),
    ("ppp=8", "ppp=8", "try space.pp."),
    ("foo=bar", "foo=bar is not a key", "try --help, which lists the words and groups."),
    ("seq=-5", "training.seq_len=-5 must be at least 1", "try 64."),  # the toy takes no more
    ("seq=8k", "training.seq_len=8k must be a whole number", "try 8192."),
    ("space.out_of_memory=20%", "must be a number", "try 0.2."),
    ("layers=24", "layers=24 is not a key", "try model.num_layers."),
    ("cluster.inter_node.bandwidth_GBps=400Gb", "must be a number", "try 50."),
    ("cluster.inter_node.bandwidth_GBps=100Gbit", "must be a number", "try 12.5."),
    ("cluster.inter_node.bandwidth_GBps=100Gbit/s", "must be a number", "try 12.5."),
    ("cluster.inter_node.bandwidth_GBps=1k", "must be a number", "try 1000."),
    ("seq=1M", "training.seq_len=1M must be a whole number", "try 1048576."),
    ("cluster.inter_node.bandwidth_Gbps=400", "not a key", "bandwidth_GBps, of bytes: an eighth."),
    ("tensor-model-parallel-size=4", "is not a key", "try tp=4."),
    (
        "--tp=4",
        "unrecognized arguments: --tp=4",
        "try keys without dashes, such as tp=4, or --help",
    ),
    (
        "--tensor-model-parallel-size=8",
        "unrecognized arguments: --tensor-model-parallel-size=8",
        "try keys without dashes, such as tensor-model-parallel-size=8, or --help",
    ),
    ("train", "the override train cannot be read", "or --help for the commands."),
    ("llama3_8b", "llama3_8b lacks its group", "try model=llama3_8b."),
    ("h100_8x8", "h100_8x8 lacks its group", "try cluster=h100_8x8."),
    ("exact", "exact lacks its group", "try search=exact."),
    ("cluster.nodes[0].count=32", "cannot be read", "try cluster.nodes.0.count=32."),
    (
        "space=[uniform,layerwise]",
        "must name one file of its group",
        "try -m space=uniform,layerwise, which plans each.",
    ),
    ("--config-name=foo", "--config-name=foo must name a file", "try config."),
    ("trainer=fsdp", "must name a file of the group trainer", "try torchtitan, or accelerate"),
    ("trainer=hf", "must name a file of the group trainer", "try accelerate."),
    ("trainer=megatron_lm", "must name a file of the group trainer", "try megatron."),
    ("recompute=true", "space.recompute=true must be one of none", "try full."),
    ("recompute=false", "space.recompute=false must be one of none", "try none."),
    ("expert_parallel=8", "is not a key", "try ep=8."),
    ("pipeline_parallel_degree=2", "is not a key", "try pp=2."),
    ("context_parallel=2", "is not a key", "try cp=2."),
    ("fsdp=true", "fsdp=true is not a key", "try zero=3."),
    # names of accelerate's ParallelismConfig, torchtitan, TrainingArguments, axolotl and LLaMA-Factory
    ("TP=4", "TP=4 is not a key", "try tp=4."),
    ("cp_size=2", "cp_size=2 is not a key", "try cp=2."),
    ("ac=full", "ac=full is not a key", "try recompute=full."),
    ("gradient_checkpointing=true", "is not a key", "try recompute=full."),
    ("activation_checkpointing=true", "is not a key", "try recompute=full."),
    ("model.module=a:make", "is not a key", "try model.path=a:make."),
    ("local_batch_size=2", "is not a key", "try mbs=2."),
    ("cutoff_len=2048", "is not a key", "try seq=2048."),
    ("flash_attn=true", "is not a key", "try training.attention_kernel=fa2."),
    ("qlora=true", "is not a key", "try training.lora_rank=16 training.frozen_bits=4."),
    ("hsdp=8", "hsdp=8 is not a key", "try space.shard_size=8."),
    ("space.schedule=1f1b", "is not a key", "try space.schedules=1f1b."),
    ("space.out_of_memory=0,2", "gives several values", "try space.out_of_memory=0.2, "),
    ("search.learning_rate=0,2,3", "gives several values", "try search.learning_rate=0, "),
    ("axis_order=tp-pp-dp", "is not a key", "try space.axis_order=tp-pp-dp."),
    ("use_tp_pp_dp_mapping=true", "is not a key", "try space.axis_order=tp-pp-dp."),
    ("space.axis_order=pp", "must be one of tp-dp-pp, tp-pp-dp", "try tp-pp-dp."),
    ("ulysses=2", "is not a key", "since Ulysses is not in the space."),
    ("virtual_pipeline_model_parallel_size=2", "is not a key", "try vpp=2."),
    ("cluster=h200_8x8", "group cluster", "try cluster=box gpu=h200 gpus=8 nodes=8."),
    ("cluster=l4_2x4", "group cluster", "try cluster=box gpu=l4 gpus=4 nodes=2."),
    ("cluster=dgx_b300", "group cluster", "or cluster=box gpu=NAME gpus=8 nodes=1 for another"),
    ("cluster=p5.48xlarge", "group cluster", "try h100_1x8 nodes=1, or cluster=box"),
    ("model=qwen3_8b", "group model", "or model=hf model.path=config.json of a local copy."),
    ("zero3=true", "zero3=true is not a key", "try zero=3."),
    ("dtype=bf16", "is not a key", "try training.precision=bf16."),
    ("dtype=fp16", "is not a key", "try training.precision=fp16."),
    ("training.frozen_bits=4", "must go with", "try 16, or training.lora_rank=16."),
    ("training.lora_targets=[v_proj]", "lora_targets=v_proj must be one of", "try linear_qkv."),
    ("training.lora_targets=[gate_proj]", "must be one of", "try linear_fc1."),
    ("model.path=meta-llama/Llama-3.1-8B", "cannot be read", "config.json on this machine."),
    ("torch_dtype=float32", "is not a key", "try training.precision=fp32."),
    ("mixed_precision=fp8", "is not a key", "try training.precision=fp8."),
    ("schedule=gpipe", "is not a key", "try space.schedules=gpipe."),
    ("pipeline_schedule=Interleaved1F1B", "is not a key", "try space.schedules=interleaved."),
    ("compile=false", "is not a key", "try training.compiled=false."),
    ("gradient_checkpointing=false", "is not a key", "try recompute=none."),
    ("attn_implementation=flash_attention_3", "is not a key", "attention_kernel=fa3."),
    ("optim=paged_adamw_8bit", "is not a key", "try training.optimizer=adam_8bit."),
    ("lr=1", "lr=1 is not a key", "since no learning rate is planned."),
    ("space.shard_size=1", "space.shard_size=1 must be above 1", "try 0"),
    ("load_in_4bit=true", "is not a key", "try training.lora_rank=16 training.frozen_bits=4."),
    ("gradient_accumulation_steps=4", "is not a key", "try num_micro_batches=..., or gbs="),
    ("layers_per_stage=20", "is not a key", "try price, whose plan.json has the layers"),
    ("world_size=64", "is not a key", "try nodes=... gpus=..., whose product it is."),
    ("fp8=true", "is not a key", "try training.precision=fp8."),
    ("pipeline=2", "is not a key", "try pp=2."),
    ("num_gpus=64", "is not a key", "try nodes=... gpus=..., where gpus are those of one node."),
    ("graph", "graph must be the first word, without --multirun", "try darts-parallel graph."),
    ("a/config.json", "a/config.json is one plan too many", "try -m plan=FIRST.json,SECOND.json"),
    ("model=qwen/config.json", "must name a file", "try model=hf model.path=qwen/config.json."),
    ("model.hidden_size=4,096", "gives several values", "try model.hidden_size=4096,"),
    ("gbs=0", "training.global_batch_size=0 must be at least 1", "try 512."),
    ("training.micro_batch_size=4", "training.micro_batch_size=4", "try space.micro_batch_size."),
    ("training.mbs=4", "training.mbs=4", "try space.micro_batch_size."),
    ("+cluster.fooo=1", "cluster.fooo=1", "try cluster."),
    ("space=layer_wise", "space=layer_wise", "try layerwise."),
    ("experiment=nope", "experiment=nope", "try "),
    ("model=null", "model=null", "try "),
    ("~model", "model is missing", "; try "),
    ("model.num_layers=???", "model.num_layers is missing", "; try "),
    # wrong types
    (
        "cluster.inter_node=${cluster.name}",
        "cluster.inter_node=toy must be a mapping",
        "latency_us: 5.0}.",
    ),
    ("output=${model.name}", "output=toy must be a mapping", "; try "),
    ("model.num_layers=x", "model.num_layers=x must be a whole number", "try 1."),
    ("model.num_layers=1.5", "model.num_layers=1.5 must be a whole number", "try 2."),
    ("model.num_layers=null", "model.num_layers=null", "; try "),
    ("model.num_layers={a:1}", "model.num_layers={a:1} must be a whole number", "; try "),
    ("search.temperature=3", "search.temperature=3 must be a list", "; try "),
    ("search.polish=2x", "search.polish=2x must be true or false", "; try "),
    ("model.num_layers=${nowhere}", "model.num_layers=${nowhere}", "; try "),
    # values
    ("model.num_layers=0", "model.num_layers=0 must be at least 1", "try 1."),
    ("search.seed=99999999999999999999999", "search.seed", "try 9223372036854775807."),
    ("model.num_heads=7", "model.num_heads=7 must divide model.hidden_size=64", "try 8."),
    ("space.pp=3", "space.pp=3 must divide the 8 GPUs", "try 2."),
    (
        "cluster.devices.toy.memory_GiB=0.01",
        "memory: model=toy",
        "cluster.devices.toy.memory_GiB=0.1",
    ),
    # syntax
    ("model.num_layers==3", "model.num_layers==3", "; try "),
    ("model.name='abc", "model.name='abc", "; try "),
    ("=3", "=3", "; try "),
    ("--foo", "--foo", "; try "),
    ("space.pp=1,2", "space.pp=1,2", "try space.pp=1, space.pp=[1,2]"),
    ("hydra.verbose=5", "", ""),
    # files
    ("plan=nowhere.json", "plan=nowhere.json", "; try "),
    ("plan=/dev/null", "plan=/dev/null is not valid JSON", "; try "),
    ("hydra.run.dir=/dev/null/x", "/dev/null/x cannot be written", "; try "),
    ("hydra.run.dir=/proc/x", "/proc/x cannot be written", "; try "),
    ("--config-dir=/nowhere", "/nowhere must be a folder", "try /."),
]
VALUES = [
    # sizes
    ("model.num_layers=10000000", "model.num_layers=10000000 must be at most", "try 1024."),
    ("model.hidden_size=100000000000000000000", "model.hidden_size", "try 16777216."),
    ("training.global_batch_size=-4", "training.global_batch_size=-4", "try 512."),
    ("cluster.nodes.0.count=1000000000", "cluster.nodes[0].count", "try 131072."),
    ("search.learning_rate=nan", "search.learning_rate=nan must be a finite number", "try "),
    ("search.penalty=inf", "search.penalty=inf must be a finite number", "; try "),
    ("cluster.inter_node.bandwidth_GBps=inf", "bandwidth_GBps=inf must be a finite", "; try "),
    ("search.temperature=[nan]", "search.temperature=nan", "; try "),
    # rules between values
    ("model.num_kv_heads=3", "model.num_kv_heads=3", "try 2."),
    ("training.seq_len=65", "training.seq_len=65", "try 64, or model.max_seq_len=65 for"),
    ("training.precision=fp8", "training.precision=fp8 must be one of bf16, fp32", "try bf16."),
    ("cluster.nodes=[]", "cluster.nodes=[]", "; try "),
    ("cluster.nodes.0.device=zz", "cluster.nodes[0].device=zz", "try toy."),
    ("space.tp=3", "space.tp=3 must divide the heads", "try 2."),
    ("space.dp=5", "space.dp=5", "try 4."),
    ("space.dp=[]", "space.dp=[]", "try null"),
    ("space.recompute=fulll", "space.recompute=fulll", "try full."),
    ("space.tp_comm_bits=5", "space.tp_comm_bits=5", "try 4"),
    ("space.grad_comm_bits=[16,32]", "space.grad_comm_bits=", "try 16"),
    ("space.shard_size=-1", "space.shard_size=-1", "try 0"),
    ("cost.pipeline=exact", "cost.pipeline=exact must be one of closed_form, simulated", "; try "),
    ("cost.schedule=gpipe", "cost.schedule=gpipe must go with cost.pipeline=simulated", "; try "),
    ("cost.p2p=overlapped", "cost.p2p=overlapped must go with cost.pipeline=simulated", "; try "),
]
"""Refused by the rules of the values alone, which need no composing."""


@pytest.mark.parametrize(("argument", "named", "way_out"), REFUSED, ids=[row[0] for row in REFUSED])
def test_bad_input_ends_in_one_sentence(
    command: Command, argument: str, named: str, way_out: str
) -> None:
    outcome = command(*TOY, argument)
    assert (outcome.status, outcome.out, len(outcome.err.strip().splitlines())) == (2, "", 1)
    assert outcome.err.startswith("darts-parallel: ")
    assert outcome.err.endswith(".\n")
    assert named in outcome.err
    assert way_out in outcome.err
    assert outcome.files == ()


@pytest.fixture(scope="module")
def composed() -> DictConfig:
    """Return what Hydra composes for the command."""
    register_schema()
    with initialize_config_dir(version_base="1.3", config_dir=str(config_dir())):
        return compose("config", list(TOY))


@pytest.mark.parametrize(("argument", "named", "way_out"), VALUES, ids=[row[0] for row in VALUES])
def test_a_bad_value_is_one_sentence(
    composed: DictConfig, argument: str, named: str, way_out: str
) -> None:
    key, _, value = argument.partition("=")
    changed = composed.copy()
    OmegaConf.update(changed, key, yaml.safe_load(value))
    with pytest.raises(DartsParallelError) as caught:
        outer_spaces(Problem.from_config(to_config(changed, [argument])))
    assert len(str(caught.value).splitlines()) == 1
    assert str(caught.value).endswith(".")
    assert named in str(caught.value)
    assert way_out in str(caught.value)
