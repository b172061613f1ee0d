"""A measured run as a problem and a plan of the cost model."""

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

from omegaconf import OmegaConf

from darts_parallel.config.cluster import ClusterConfig, DeviceConfig, LinkConfig, NodeGroupConfig
from darts_parallel.config.composition import load_config
from darts_parallel.config.model import ModelConfig
from darts_parallel.config.schema import Config, TrainingConfig, config_dir
from darts_parallel.plan.legality import check_plan
from darts_parallel.plan.strategy import LayerStrategy, Plan
from darts_parallel.problem.problem import Problem
from darts_parallel.problem.software import Software
from experiments.calibration.hardware import NVLINK_DOMAINS, Network, node_groups
from experiments.calibration.mixtures import expert_strategy, printed_layout, with_mixture
from experiments.calibration.rows import RowError
from experiments.calibration.rules import ALTERNATE, LORA_TARGETS, Run

LATENCY_US = {"inside": 3.0, "between": 5.0}
"""Orders of magnitude of NCCL, before calibration."""


@dataclass(frozen=True)
class Case:
    """A run that the cost model can express; device and links are those of its first node group."""

    run: Run
    problem: Problem
    plan: Plan
    device: str
    intra: Network
    inter: Network


def build_case(run: Run) -> Case:
    """The problem and plan of a run.

    Errors:
        DartsParallelError: the cost model cannot express it; the message says why.
    """
    groups = node_groups(run.row, run.gpus, run.gpus_per_node)
    gpus = nodes_of(run.gpus, run.gpus_per_node)
    first = groups[0]
    nodes = [
        NodeGroupConfig(
            group.nodes or run.gpus // gpus, gpus, group.device, _link(group.intra, "inside"),
            inter_node=_link(group.inter, "between") if group is not first else None,
        )
        for group in groups
    ]  # fmt: skip
    domain = NVLINK_DOMAINS.get(first.device)
    cluster = ClusterConfig(
        name=f"{run.gpus}x{first.device}",
        nodes=nodes,
        inter_node=_link(first.inter, "between"),
        devices={group.device: device_config(group.device) for group in groups},
        nvlink_domain_gpus=domain if domain and domain % gpus == 0 else None,
    )
    model, training = with_mixture(run.row, _model(run), _training(run))
    config = replace(base_config(), model=model, cluster=cluster, training=training)
    software = Software(
        run.stack.name, run.stack.gradient_bytes, run.stack.owner_broadcast_ms * 1e-3, run.stack.single_ring
    )
    problem, plan = replace(Problem.from_config(config), software=software), _plan(run)
    check_plan(plan, problem)
    return Case(run, problem, plan, first.device, first.intra, first.inter)


def nodes_of(gpus: int, gpus_per_node: int) -> int:
    """GPUs that a run uses on each node: whole nodes, else the largest equal share of them."""
    if gpus <= gpus_per_node:
        return gpus
    return next(n for n in range(gpus_per_node, 0, -1) if gpus % n == 0)


@lru_cache(maxsize=1)
def base_config() -> Config:
    """The shipped configuration, for all that a run does not change."""
    return load_config()


@lru_cache(maxsize=64)
def device_config(name: str) -> DeviceConfig:
    """The shipped device of a name."""
    values = OmegaConf.load(Path(config_dir()) / "device" / f"{name}.yaml")
    device = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(DeviceConfig), values))
    assert isinstance(device, DeviceConfig)
    return device


def _link(network: Network, place: str) -> LinkConfig:
    return LinkConfig(network.bandwidth, LATENCY_US[place], 1.0, network.shared, network.peer_links)


def _model(run: Run) -> ModelConfig:
    family = run.family
    return ModelConfig(
        name=run.row.text("model") or "unnamed",
        num_layers=run.layers,
        hidden_size=run.hidden,
        num_heads=run.heads,
        num_kv_heads=run.kv_heads,
        ffn_hidden_size=run.ffn,
        gated_mlp=run.gated_mlp,
        vocab_size=run.vocab,
        tie_embeddings=run.tied,
        max_seq_len=run.seq_len,
        causal=family.causal,
        learned_positions=family.learned_positions,
        dropout=family.dropout,
        linear_bias=family.bias,
        norm_bias=family.norm_bias,
        embedding_norm=family.embedding_norm,
    )


def _training(run: Run) -> TrainingConfig:
    return TrainingConfig(
        global_batch_size=run.global_batch,
        seq_len=run.seq_len,
        precision=run.precision,
        fused_attention=run.stack.fused_attention,
        lora_rank=run.lora_rank,
        lora_targets=list(LORA_TARGETS),
    )


def _plan(run: Run) -> Plan:
    kind = "none" if run.recompute == ALTERNATE else run.recompute
    base = LayerStrategy(
        run.tp, run.dp, run.zero_stage, kind, run.sequence_parallel, shard_size=run.shard_size
    )
    base = expert_strategy(run.row, base)
    blocks = [replace(base, recompute="full") if run.recompute == ALTERNATE and i % 2 else base
              for i in range(run.layers)]  # fmt: skip
    return Plan(
        run.num_micro_batches,
        boundaries_of(run),
        (base, *blocks, base, base),
        run.cp,
        run.virtual_stages,
        offload=((0.0, 1.0),) * run.pp if run.offload else (),
    )


def boundaries_of(run: Run) -> tuple[int, ...]:
    """First layer of every chunk, and the end; embedding is layer 0, head and loss are the last two."""
    chunks = run.pp * run.virtual_stages
    counts = _printed_stages(run) if run.virtual_stages == 1 else None
    printed = printed_layout(run.row)
    if printed is not None and len(printed) == chunks and sum(printed) == run.layers:
        counts = list(printed)
    if counts is None:
        uneven = run.layers % chunks and (run.layers + 2) % chunks == 0 and run.pp > 1
        ends = "type:transformer|embedding" in run.row.text("notes") or uneven
        total = run.layers + (2 if ends else 0)
        counts = [total // chunks + (k < total % chunks) for k in range(chunks)]
        if ends:
            counts[0] -= 1
            counts[-1] -= 1
    if min(counts) < 0 or any(n == 0 for n in counts[1:-1]):
        raise RowError(f"a stage without layers: {' '.join(map(str, counts))} blocks per stage")
    starts = [0]
    for count in counts[:-1]:
        starts.append(starts[-1] + count + (len(starts) == 1))
    return (*starts, run.layers + 3)


def _printed_stages(run: Run) -> list[int] | None:
    """Blocks per stage of "layers per stage 9 6 6 9 (of 30 entries ...)".

    Entries beyond the blocks (type conversion, embedding, transposes, norm, head) stand half at the
    beginning, half at the end.
    """
    found = re.search(r"layers per stage ([\d ]+)", run.row.text("notes"))
    if not found:
        return None
    counts = [int(n) for n in found[1].split()]
    if len(counts) != run.pp or sum(counts) < run.layers:
        raise RowError(
            f"layers per stage {found[1].strip()} does not fit pp={run.pp} and {run.layers} layers"
        )
    before = (sum(counts) - run.layers) // 2
    edges = [0]
    for count in counts:
        edges.append(edges[-1] + count)
    places = [min(max(edge - before, 0), run.layers) for edge in edges]
    return [end - first for first, end in pairwise(places)]
