"""What the command refuses: one sentence, exit status 2, nothing left behind."""

import pytest
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from darts_parallel.config.composition import to_config
from darts_parallel.config.schema import config_dir, register_schema
from darts_parallel.errors import DartsParallelError
from darts_parallel.plan.space import outer_spaces
from darts_parallel.problem.problem import Problem
from tests.support.commands import TOY, Command

REFUSED = [
    # misspelt keys and groups
    ("modle=toy", "modle=toy", "nearest legal: model."),
    ("model=tooy", "model=tooy", "nearest legal: toy."),
    ("model.num_layer=3", "model.num_layer=3 is not a key", "nearest legal: model.num_layers."),
    (
        "cluster.inter_node.bandwith_GBps=10",
        "cluster.inter_node.bandwith_GBps=10 is not a key",
        "nearest legal: cluster.inter_node.bandwidth_GBps.",
    ),
    (
        "cluster.nodes.0.intra_node.latency_ms=3",
        "cluster.nodes.0.intra_node.latency_ms=3 is not a key",
        "nearest legal: cluster.nodes.0.intra_node.latency_us.",
    ),
    (
        "cluster.inter_node.bandwidth_GBps=4e11",
        "cluster.inter_node.bandwidth_GBps=4e+11",
        "nearest legal: 1e+06",
    ),
    ("model.foo.bar=3", "model.foo.bar=3 is not a key", "nearest legal: model."),
    ("+model.num_layer=3", "model.num_layer=3 is not a key", "nearest legal: model.num_layers."),
    ("++model.foo.bar=3", "model.foo is not a key", "nearest legal: model."),
    ("search.num_step=3", "search.num_step=3", "nearest legal: search.num_steps."),
    ("search.lr=0.1", "search.lr=0.1", "nearest legal: search.learning_rate."),
    ("pp=8", "pp=8", "nearest legal: space.pp."),
    ("training.micro_batch_size=4", "training.micro_batch_size=4", "nearest legal: space.micro_batch_size."),
    ("training.mbs=4", "training.mbs=4", "nearest legal: space.micro_batch_size."),
    ("+cluster.fooo=1", "cluster.fooo=1", "nearest legal: cluster."),
    ("space=layer_wise", "space=layer_wise", "nearest legal: layerwise."),
    ("experiment=nope", "experiment=nope", "nearest legal: "),
    ("model=null", "model=null", "nearest legal: "),
    ("~model", "model is missing", "nearest legal"),
    ("model.num_layers=???", "model.num_layers is missing", "nearest legal"),
    # wrong types
    ("model.num_layers=x", "model.num_layers=x must be a whole number", "nearest legal: 1."),
    ("model.num_layers=1.5", "model.num_layers=1.5 must be a whole number", "nearest legal: 2."),
    ("model.num_layers=null", "model.num_layers=null", "nearest legal"),
    ("model.num_layers={a:1}", "model.num_layers={a:1} must be a whole number", "nearest legal"),
    ("search.temperature=3", "search.temperature=3 must be a list", "nearest legal"),
    ("search.polish=2x", "search.polish=2x must be true or false", "nearest legal"),
    ("model.num_layers=${nowhere}", "model.num_layers=${nowhere}", "nearest legal"),
    # values
    ("model.num_layers=0", "model.num_layers=0 must be at least 1", "nearest legal: 1."),
    ("search.seed=99999999999999999999999", "search.seed", "nearest legal: 9223372036854775807."),
    ("model.num_heads=7", "model.num_heads=7 must divide model.hidden_size=64", "nearest legal: 8."),
    ("space.pp=3", "space.pp=3 must divide the 8 GPUs", "nearest legal: 2."),
    ("cluster.devices.toy.memory_GiB=0.01", "memory: model=toy", "cluster.devices.toy.memory_GiB=0.1"),
    # syntax
    ("model.num_layers==3", "model.num_layers==3", "nearest legal"),
    ("model.name='abc", "model.name='abc", "nearest legal"),
    ("=3", "=3", "nearest legal"),
    ("--foo", "--foo", "nearest legal"),
    ("space.pp=1,2", "space.pp=1,2", "nearest legal: space.pp=1, space.pp=[1,2]"),
    ("hydra.verbose=5", "", ""),
    # files
    ("plan=nowhere.json", "plan=nowhere.json", "nearest legal"),
    ("plan=/dev/null", "plan=/dev/null is not valid JSON", "nearest legal"),
    ("hydra.run.dir=/dev/null/x", "/dev/null/x cannot be written", "nearest legal"),
    ("hydra.run.dir=/proc/x", "/proc/x cannot be written", "nearest legal"),
    ("--config-dir=/nowhere", "/nowhere must be a folder", "nearest legal: /."),
]
VALUES = [
    # sizes
    ("model.num_layers=10000000", "model.num_layers=10000000 must be at most", "nearest legal: 1024."),
    ("model.hidden_size=100000000000000000000", "model.hidden_size", "nearest legal: 16777216."),
    ("training.global_batch_size=-4", "training.global_batch_size=-4", "nearest legal: 1."),
    ("cluster.nodes.0.count=1000000000", "cluster.nodes[0].count", "nearest legal: 131072."),
    ("search.learning_rate=nan", "search.learning_rate=nan must be a finite number above 0", "nearest"),
    ("search.penalty=inf", "search.penalty=inf must be a finite number", "nearest legal"),
    ("cluster.inter_node.bandwidth_GBps=inf", "bandwidth_GBps=inf must be a finite", "nearest legal"),
    ("search.thin_at=[nan]", "search.thin_at=nan", "nearest legal"),
    # rules between values
    ("model.num_kv_heads=3", "model.num_kv_heads=3", "nearest legal: 2."),
    ("training.seq_len=65", "training.seq_len=65", "nearest legal: 64."),
    ("training.precision=fp8", "training.precision=fp8 must be one of bf16, fp32", "nearest legal: bf16."),
    ("cluster.nodes=[]", "cluster.nodes=[]", "nearest legal"),
    ("cluster.nodes.0.device=zz", "cluster.nodes[0].device=zz", "nearest legal: toy."),
    ("space.tp=3", "space.tp=3 must divide the heads", "nearest legal: 2."),
    ("space.dp=5", "space.dp=5", "nearest legal: 4."),
    ("space.dp=[]", "space.dp=[]", "nearest legal: null"),
    ("space.recompute=fulll", "space.recompute=fulll", "nearest legal: full."),
]
"""Refused by the rules of the values alone, which need no composing."""


@pytest.mark.parametrize(("argument", "named", "way_out"), REFUSED, ids=[row[0] for row in REFUSED])
def test_bad_input_ends_in_one_sentence_and_leaves_nothing(
    command: Command, argument: str, named: str, way_out: str
) -> None:
    outcome = command(*TOY, argument)
    assert outcome.status == 2
    assert outcome.out == ""
    assert len(outcome.err.strip().splitlines()) == 1
    assert outcome.err.startswith("darts-parallel: ")
    assert outcome.err.endswith(".\n")
    assert named in outcome.err
    assert way_out in outcome.err
    assert outcome.files == ()


@pytest.fixture(scope="module")
def composed() -> DictConfig:
    """What Hydra composes for the command."""
    register_schema()
    with initialize_config_dir(version_base="1.3", config_dir=config_dir()):
        return compose("config", list(TOY))


@pytest.mark.parametrize(("argument", "named", "way_out"), VALUES, ids=[row[0] for row in VALUES])
def test_a_bad_value_is_refused_in_one_sentence(
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
