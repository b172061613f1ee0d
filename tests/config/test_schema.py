from itertools import cycle, islice
from pathlib import Path
from shutil import copytree
from statistics import mean

import pytest
from omegaconf import OmegaConf

from darts_parallel.config import composition
from darts_parallel.config._keys import all_keys
from darts_parallel.config.composition import load_config
from darts_parallel.config.schema import Config, config_dir
from darts_parallel.config.trainer import EXPORTS, Trainer, group_file, read_trainer
from darts_parallel.errors import ConfigError
from darts_parallel.planner import FAMILIES
from darts_parallel.problem.problem import load_problem

CONTRACT = """\
name: a10_8x4
nodes:                    # node groups, in rank order
  - {count: 8, gpus: 4, device: a10, intra_node: {bandwidth_GBps: 16.0, latency_us: 5.0}}
inter_node: {bandwidth_GBps: 5.0, latency_us: 10.0}
devices:
  a10: {memory_GiB: 24.0, peak_TFLOPs: {bf16: 125.0, fp32: 31.2}, memory_bandwidth_GBps: 600.0}
"""


def own_cluster(folder: Path, text: str) -> str:
    (folder / "cluster").mkdir(exist_ok=True)
    (folder / "cluster/mine.yaml").write_text(text)
    return str(folder)


def test_a_cluster_with_its_devices_inline_is_read_from_a_folder_of_the_user(
    tmp_path: Path,
) -> None:
    problem = load_problem(["cluster=mine"], config_dir=own_cluster(tmp_path, CONTRACT))
    assert problem.cluster.num_devices == 32
    assert problem.cluster.groups[0].device.peak_flops == 125e12
    assert problem.cluster.inter_node.bandwidth == 5e9


def test_a_gpu_of_three_keys_has_the_figures_of_a_shipped_one_without_runs(tmp_path: Path) -> None:
    problem = load_problem(["cluster=mine"], config_dir=own_cluster(tmp_path, CONTRACT))
    shipped = load_config(["cluster=a10_8x4"])
    mine, a10 = (config.cluster.devices["a10"] for config in (problem.config, shipped))
    assert mine.reserved_GiB is None
    assert mine.kept_gib == pytest.approx(a10.kept_gib, abs=0.005)
    assert problem.cluster.groups[0].device.reserved == mine.kept_gib * 2.0**30
    own = ("peak_TFLOPs", "host_bandwidth_GBps", "reserved_GiB", "gemm_efficiency")
    assert vars(mine) | {key: vars(a10)[key] for key in own} == vars(a10)
    measured = {
        FAMILIES.get(path.stem, path.stem): OmegaConf.load(path).gemm_efficiency
        for path in config_dir().glob("device/*.yaml")
        if "fitted to runs on this GPU" in path.read_text()
    }
    assert mine.gemm_efficiency == pytest.approx(mean(measured.values()), abs=0.01)


BROKEN_CLUSTERS = [
    ("device: a10", "device: a11", "cluster.nodes[0].device=a11 must be one of a10; try a10."),
    ("gpus: 4", "gpus: 0", "cluster.nodes[0].gpus=0 must be at least 1"),
    ("gpus: 4", "gppus: 4", "gppus is not a key of the configuration; try cluster.nodes[].gpus."),
    ("gpus: 4", "gpus: four", "gpus=four must be a whole number"),
    ("bf16: 125", "bf17: 125", "bf17 must be one of bf16, fp16, fp32, fp8, mxfp8, nvfp4; try "),
    ("memory_GiB: 24.0, ", "", "cluster.devices.a10.memory_GiB is missing"),
    (
        "bandwidth_GBps: 600.0",
        "bandwidth_GBps: .nan",
        "memory_bandwidth_GBps=nan must be a finite number",
    ),
    ("{bf16: 125.0, fp32: 31.2}", "125", "cluster.devices.a10.peak_TFLOPs=125 must be a mapping"),
    (CONTRACT, "just a word\n", "not a key"),
    (CONTRACT, "- 1\n", "cluster must be a mapping"),
    ("{bf16: 125.0, fp32: 31.2}", "[125]", "cluster.devices.*.peak_TFLOPs or "),
    (CONTRACT, "nodes: {count: 1}\n", "cluster.nodes or cluster.runs must be a list; try []."),
    (CONTRACT, "name: [\n", "mine.yaml"),
    (CONTRACT, "", "cluster.name is missing"),
]


@pytest.mark.parametrize(
    ("old", "new", "sentence"), BROKEN_CLUSTERS, ids=[r[2][:40] for r in BROKEN_CLUSTERS]
)
def test_a_broken_cluster_file_is_one_sentence(
    tmp_path: Path, old: str, new: str, sentence: str
) -> None:
    folder = own_cluster(tmp_path, CONTRACT.replace(old, new))
    with pytest.raises(ConfigError) as caught:
        load_problem(["cluster=mine"], config_dir=folder)
    assert sentence in str(caught.value)
    assert str(caught.value).endswith(".")
    assert "\n" not in str(caught.value)


def test_a_binary_file_is_refused_in_one_sentence(tmp_path: Path) -> None:
    folder = own_cluster(tmp_path, "")
    (tmp_path / "cluster/mine.yaml").write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_problem(["cluster=mine"], config_dir=folder)


@pytest.mark.parametrize(
    "overrides", [["model=nope"], ["modle=toy"], ["search.seed=1,2"], ["a b"], [""]]
)
def test_wrong_overrides_of_the_python_interface_raise_config_errors(overrides: list[str]) -> None:
    with pytest.raises(ConfigError):
        load_problem(overrides)


def test_a_failed_load_leaves_hydra_usable() -> None:
    with pytest.raises(ConfigError):
        load_config(["model=nope"])
    assert load_config(["model=toy", "cluster=toy", "training=toy"]).cluster.name == "toy"


@pytest.mark.parametrize(
    "overrides",
    [
        [
            "model=toy",
            "cluster=toy",
            "training=toy",
            "space.pp=2",
            "space.tp=[1,2]",
            "space.dp=null",
        ],
        [
            "experiment=tight_memory",
            "search.learning_rate=1e-2",
            "search.polish=false",
            "space.recompute=full",
        ],
        [
            "cluster=toy_mixed",
            "cluster.nodes.0.count=3",
            "cluster.devices.toy.memory_GiB=2",
            "training.seq_len=64",
        ],
        ["space=uniform", "space.recompute=[none,full]", "cost.pipeline=simulated"],
    ],
)
def test_groups_that_are_composed_once_give_what_hydra_composes(overrides: list[str]) -> None:
    whole = composition.compose_whole(overrides)
    assert composition.composed_config(overrides) == whole
    assert composition.composed_config(overrides) == whole


@pytest.mark.parametrize(
    "override",
    ["space.ppp=2", "modle=toy", "price=maybe", "search.num_steps=many", "plan.x=1"],
)
def test_a_refused_value_has_the_sentence_of_hydra_without_another_composition(
    monkeypatch: pytest.MonkeyPatch, override: str
) -> None:
    overrides = ["model=toy", "cluster=toy", "training=toy", override]
    with pytest.raises(ConfigError) as hydras:
        composition.compose_whole(overrides)
    composition.composed_config(overrides[:-1])
    monkeypatch.setattr(composition, "compose_whole", None)
    with pytest.raises(ConfigError) as own:
        composition.composed_config(overrides)
    assert str(own.value) == str(hydras.value)


def test_a_file_that_changed_is_composed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copytree(config_dir(), tmp_path / "conf")
    monkeypatch.setattr(composition, "config_dir", lambda: tmp_path / "conf")
    assert load_config(["search.seed=3"]).training.global_batch_size == 1024
    file = tmp_path / "conf/training/llama2_7b.yaml"
    file.write_text(file.read_text().replace("size: 1024", "size: 64"))
    assert load_config(["search.seed=3"]).training.global_batch_size == 64
    file.rename(file.with_name("other.yaml"))
    file.with_name("toy.yaml").rename(file)
    assert load_config(["search.seed=3"]).training.global_batch_size == 16


def stems(group: str) -> list[str]:
    return sorted(path.stem for path in (Path(config_dir()) / group).glob("*.yaml"))


MODELS = [name for name in stems("model") if name not in ("hf", "module")]
CLUSTERS = [name for name in stems("cluster") if name != "box"]
PRESETS = list(
    zip(islice(cycle(MODELS), max(len(MODELS), len(CLUSTERS))), cycle(CLUSTERS), strict=False)
)


@pytest.mark.parametrize(("model", "cluster"), PRESETS)
def test_every_cluster_and_every_model_with_its_job_is_valid(model: str, cluster: str) -> None:
    precision = (
        "training.precision=fp16" if cluster.startswith("v100") else "training.precision=bf16"
    )
    problem = load_problem([f"model={model}", f"cluster={cluster}", precision])
    assert problem.config.model.name == model
    assert problem.cluster.name == cluster


def test_the_keys_of_the_schema_are_listed_with_their_paths() -> None:
    keys = all_keys(Config)
    assert {
        "model.num_layers",
        "cluster.nodes[].gpus",
        "cluster.devices.*.memory_GiB",
        "plan",
    } <= set(keys)
    assert len(keys) == len(set(keys))


def test_files_of_trainers_keep_the_types_of_the_schema() -> None:
    """They are read without OmegaConf's checks, which take 20 ms a file."""
    for name in EXPORTS:
        given = OmegaConf.load(group_file("trainer", name)).trainer
        checked = OmegaConf.merge(OmegaConf.structured(Trainer), given)
        assert OmegaConf.to_object(checked) == read_trainer(name)
