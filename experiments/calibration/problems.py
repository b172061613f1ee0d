"""A measured run as a problem and a plan of the cost model."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import accumulate
from typing import Any

from darts_parallel.config import (
    ClusterConfig,
    Config,
    DeviceConfig,
    LinkConfig,
    ModelConfig,
    NodeGroupConfig,
    TrainingConfig,
    group_file,
    load_config,
    read_typed,
    read_yaml,
)
from darts_parallel.errors import DartsParallelError, Entries
from darts_parallel.plans import LayerStrategy, Plan, check_plan
from darts_parallel.problem import OLD_KERNEL, Problem, with_habits
from experiments.data.runs import ALTERNATE, MeasuredRun, sizes_of
from experiments.data.table import frameworks, word_tables

LATENCY_US = {"inside": 3.0, "between": 5.0}
"""Orders of magnitude of NCCL, before calibration."""


@dataclass(frozen=True)
class MeasuredCase:
    """A run that the cost model can express."""

    run: MeasuredRun
    problem: Problem
    plan: Plan


def build_case(run: MeasuredRun) -> MeasuredCase:
    """Build the problem and the plan of a run.

    Errors:
        DartsParallelError: the cost model cannot express it; the message says why.
    """
    config = replace(
        base_config(), model=_model(run), cluster=_cluster(run), training=_training(run)
    )
    facts = frameworks()[run.framework]
    # a switch that neither the row nor its recipe names is unknown, whatever the framework's default
    habits = facts | facts.get("past", {}) | {"gradient_bits": run.gradient_bits, "runs": {}}
    software = with_habits(run.framework, habits).under(config.training)
    if run.attention_kernel == OLD_KERNEL:
        software = replace(software, job={**software.job, "attention_kernel": OLD_KERNEL})
    software = replace(software, partitioned_checkpoints=run.partition_activations)
    problem = replace(Problem.from_config(config), software=software)
    plan = _plan(run)
    check_plan(plan, problem.model, problem.cluster, problem.training, problem.measured)
    return MeasuredCase(run, problem, plan)


def read_cases(runs: Sequence[MeasuredRun]) -> list[MeasuredCase | str]:
    """Turn every run into a case, or the reason why it is none."""
    result = []
    for run in runs:
        try:
            result.append(run.skipped or build_case(run))
        except DartsParallelError as error:
            result.append(str(error))
    return result


@lru_cache(maxsize=1)
def base_config() -> Config:
    """Load the shipped configuration, for all that a run does not change."""
    return load_config()


@lru_cache(maxsize=64)
def device_config(name: str) -> DeviceConfig:
    """Load the shipped device of a name."""
    return read_typed(DeviceConfig, read_yaml(group_file("device", name)))


def _cluster(run: MeasuredRun) -> ClusterConfig:
    words = word_tables()
    inter = [LinkConfig(rate, LATENCY_US["between"], 1.0) for rate in run.inter_GBps]
    nodes = []
    for index, device in enumerate(run.devices):
        shared = run.intra_links[index] == "pcie"
        rate = run.intra_GBps[index]
        intra = LinkConfig(
            rate, LATENCY_US["inside"], 1.0, shared, words["peer_links"].get(device, 0)
        )
        out = inter[index] if index else None
        count = run.nodes[index]
        nodes.append(NodeGroupConfig(count, run.gpus_per_node, device, intra, inter_node=out))
    domain = words["nvlink_domains"].get(run.devices[0])
    whole = domain and domain % run.gpus_per_node == 0
    devices = {device: device_config(device) for device in run.devices}
    return ClusterConfig(
        name=f"{run.gpus}x{run.devices[0]}",
        nodes=nodes,
        inter_node=inter[0],
        devices=devices,
        nvlink_domain_gpus=domain if whole else None,
    )


def _same_fields(kind: type[Any], run: MeasuredRun) -> Entries:
    """Take the fields of a run that a configuration has under the same name."""
    return {
        field.name: getattr(run, field.name) for field in fields(kind) if hasattr(run, field.name)
    }


def _model(run: MeasuredRun) -> ModelConfig:
    given = {"name": run.model or "unnamed", "max_seq_len": run.seq_len}
    if not run.architecture:
        return ModelConfig(**(_same_fields(ModelConfig, run) | given))
    return ModelConfig(**(sizes_of(run.architecture) | given))


def _training(run: MeasuredRun) -> TrainingConfig:
    given = _same_fields(TrainingConfig, run)
    if run.attention_kernel == OLD_KERNEL:
        given["attention_kernel"] = None
    for key in ("recompute_modules", "lora_targets"):
        if names := given.pop(key):
            given[key] = list(names)
    if run.architecture:
        given["moe_load_imbalance"] = 1.0  # benchmarks of speed route evenly
    return TrainingConfig(**given)


def _plan(run: MeasuredRun) -> Plan:
    kind = "none" if run.recompute == ALTERNATE else run.recompute
    base = LayerStrategy(run.tp, run.dp, run.zero_stage, kind, run.sequence_parallel)
    base = replace(base, shard_size=run.shard_size, ep=run.ep, etp=run.etp)
    odd = replace(base, recompute="full") if run.recompute == ALTERNATE else base
    # embedding before the blocks, head and loss after them
    layers = (base, *(odd if i % 2 else base for i in range(run.num_layers)), base, base)
    starts = [0, *(1 + blocks for blocks in accumulate(run.blocks[:-1]))]
    shares = (float(run.cpu_checkpointing), float(run.offload))
    offload = (shares,) * run.pp if any(shares) else ()
    return Plan(
        run.num_micro_batches,
        (*starts, run.num_layers + 3),
        layers,
        run.cp,
        run.virtual_stages,
        offload=offload,
    )
