"""Leave out of a space what the trainer of `space.trainer` lacks (`conf/trainer/`)."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from darts_parallel.config import COMM_BITS, MAMBA, Config, Trainer, TrainingConfig
from darts_parallel.plans.strategy import LayerStrategy
from darts_parallel.problem import Model, Software
from darts_parallel.schedules import NAMES, SEARCHED


def trainer_schedules(trainer: Trainer) -> tuple[str, ...]:
    """Return the pipeline schedules that a trainer runs."""
    return (*NAMES, SEARCHED) if trainer.schedules is None else tuple(trainer.schedules)


def job_facts(model: Model, training: TrainingConfig, software: Software) -> dict[str, Any]:
    """Return the settings of a job that the rules of `conf/trainer/` may name."""
    config = model.config
    return {
        "optimizer": training.optimizer,
        "gradient_bits": software.gradient_bits,
        "lora_rank": training.lora_rank,
        "tie_embeddings": config.tie_embeddings,
        "num_encoder_layers": config.num_encoder_layers,
        "num_experts": (config.num_experts or 0) if model.has_experts else 0,
        "mtp_num_layers": config.mtp_num_layers,
        "learned_positions": config.learned_positions,
        "multi_latent_attention": config.multi_latent_attention,
        "mamba_layers": (config.hybrid_override_pattern or "").count(MAMBA),
    }


def facts(job: dict[str, Any], pp: int, cp: int, strategy: LayerStrategy) -> dict[str, Any]:
    """Return the settings of `job_facts` and those of a layer under outer degrees."""
    copies, shards, experts = strategy.dp * cp, strategy.shard_size, job["num_experts"]
    whole = not strategy.zero_stage or shards == copies
    sharded = (shards or copies) if strategy.zero_stage else 1
    return job | {
        "pp": pp,
        "cp": cp,
        "dp": strategy.dp,
        "tp": strategy.tp,
        "etp": strategy.etp,
        "copies": max(
            copies, copies * strategy.tp // (strategy.ep * strategy.etp) if experts else 1
        ),
        "ep": strategy.ep,
        "grad_comm_bits": strategy.grad_comm_bits,
        "ep_across_replicas": strategy.ep if sharded * strategy.tp % strategy.ep else 1,
        "zero_stage": strategy.zero_stage,
        "shard_size": 0 if whole else shards,
        "recompute": strategy.recompute,
        "sequence_parallel": strategy.sequence_parallel,
    }


def trainer_runs(
    rules: Trainer, job: dict[str, Any], pp: int, cp: int, schedule: str, strategy: LayerStrategy
) -> bool:
    """Return whether a trainer runs this strategy for all layers of a job (`job_facts`)."""
    given = facts(job, pp, cp, strategy)
    sharded = given["shard_size"] or strategy.dp * cp
    return (
        (pp == 1 or schedule in trainer_schedules(rules))  # one device has no order to choose
        and not (rules.own_stages and pp > 1)
        and not (rules.whole_context_groups and sharded % cp)
        and min(strategy.tp_comm_bits, strategy.grad_comm_bits) == max(COMM_BITS)
        and not any(lack.holds(given) for lack in rules.lacks)
    )


def lacking(rules: Trainer, job: dict[str, Any], spaces: Sequence[Any]) -> str:
    """Return a clause with what keeps a trainer from most strategies of outer spaces, or nothing."""
    given = (facts(job, own.pp, own.cp, choice) for own in spaces for choice in own.choices)
    found = Counter(lack.sentence(row) for row in given for lack in rules.lacks if lack.holds(row))
    return f": {max(found, key=lambda why: (found[why], ' with ' in why))}" if found else ""


def trainer_parts(
    config: Config, choices: tuple[LayerStrategy, ...]
) -> list[tuple[LayerStrategy, ...]]:
    """Return the strategies that the trainer's layers may have next to each other, in sets that hold all.

    A trainer of layer-wise plans (`whole_ends: always`, Galvatron) has one switch for sequence parallelism,
    and one type of data parallelism next to ZeRO-3.
    """
    name, kind = config.space.trainer, config.space.kind
    if name is None or kind == "uniform" or config.abilities(name).whole_ends != "always":
        return [choices]
    parts = [
        tuple(
            own
            for own in choices
            if own.sequence_parallel in (own.tp > 1 and switch, False)
            and (own.tp == 1 or own.sequence_parallel == switch)
            and own.zero_stage in (usual, 3)
        )
        for switch in (True, False)
        for usual in (0, 2)
    ]
    return [
        own
        for own in dict.fromkeys(parts)
        if own and not any(set(own) < set(other) for other in parts)
    ]
