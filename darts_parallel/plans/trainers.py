"""Leave out of a space what the trainer of `space.trainer` lacks (`conf/trainer/`)."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from darts_parallel.config import LOSSLESS, MAMBA, Config, Trainer, TrainingConfig
from darts_parallel.errors import Entries
from darts_parallel.plans.own_stages import own_stage_refusal
from darts_parallel.plans.strategy import LayerStrategy, Plan, Strategies
from darts_parallel.problem import Model, Software
from darts_parallel.schedules import NAMES, SEARCHED, usual_schedule


def trainer_schedules(trainer: Trainer) -> tuple[str, ...]:
    """Return the pipeline schedules that a trainer runs."""
    return (*NAMES, SEARCHED) if trainer.schedules is None else tuple(trainer.schedules)


def job_facts(
    model: Model, training: TrainingConfig, software: Software, offloaded: float = 0.0
) -> Entries:
    """Return the settings of a job that the rules of `conf/trainer/` may name.

    These are the keys of its model and its training, and some that follow from them.

    Args:
        offloaded: Given share of the optimizer's state in host memory.
    """
    config = model.config
    job = vars(config) | vars(training)
    job["gradient_bits"] = software.gradient_bits
    job["num_experts"] = (config.num_experts or 0) if model.has_experts else 0
    pattern = config.hybrid_override_pattern or ""
    job["mamba_layers"] = pattern.count(MAMBA)
    job["hybrid_layers"] = len(pattern)
    job["windowed_heads"] = config.kv_heads * bool(config.sliding_window or config.attention_sinks)
    job["offloaded_optimizer"] = offloaded
    job["partly_offloaded"] = 0.0 if offloaded == 1.0 else offloaded
    return job


def facts(job: Entries, pp: int, cp: int, schedule: str, strategy: LayerStrategy) -> Entries:
    """Return the settings of `job_facts` and of a layer under outer degrees.

    `uneven_heads` is not 0 where tp and cp together do not divide `windowed_heads`.
    `copies` counts the replicas of the weights, of dense layers or of experts, whichever has more.
    `ep_across_replicas` is `ep` where expert groups span ranks that replicate dense weights, else
    1.
    """
    copies = strategy.dp * cp
    expert_copies = 1
    if job["num_experts"]:
        expert_copies = copies * strategy.tp // (strategy.ep * strategy.etp)
    shards = strategy.shard_size
    sharded = strategy.shard_ranks(cp) if strategy.zero_stage else 1
    own = dict(vars(strategy))
    own["uneven_heads"] = job["windowed_heads"] % (strategy.tp * cp)
    own["copies"] = max(copies, expert_copies)
    own["shard_size"] = 0 if not strategy.zero_stage or shards == copies else shards
    own["ep_across_replicas"] = strategy.ep if sharded * strategy.tp % strategy.ep else 1
    return job | own | {"pp": pp, "cp": cp, "schedule": schedule}


def rules_of_job(rules: Trainer, job: Entries) -> Trainer:
    """Return the abilities of a trainer without what it lacks in other jobs alone.

    Errors:
        ConfigError: a combination that it lacks names no setting.
    """
    settings = facts(job, 1, 1, "", LayerStrategy(1, 1))
    lacks = []
    for lack in rules.lacks:
        lack.require_settings(settings)
        if lack.may_hold(job):
            lacks.append(lack)
    return replace(rules, lacks=lacks)


def trainer_runs(
    rules: Trainer, job: Entries, pp: int, cp: int, schedule: str, strategy: LayerStrategy
) -> bool:
    """Return whether a trainer runs this strategy for all layers of a job (`job_facts`).

    Whether it runs the stages of a plan says `trainer_runs_plan`.
    """
    if pp > 1 and schedule not in trainer_schedules(rules):
        return False
    if min(strategy.tp_comm_bits, strategy.grad_comm_bits) < LOSSLESS:
        return False
    given = facts(job, pp, cp, schedule, strategy)
    sharded = given["shard_size"] or strategy.dp * cp
    if rules.whole_context_groups and sharded % cp:
        return False
    return not any(lack.holds(given) for lack in rules.lacks)


def trainer_runs_plan(rules: Trainer, job: Entries, model: Model, plan: Plan) -> bool:
    """Return whether a trainer runs a plan, as far as the rules of `conf/trainer/` say it."""
    strategies = set(plan.layers)
    if plan.inside_nodes and not rules.inside_pipelines:
        return False
    if rules.executable:
        return plan.cp == 1
    if len(strategies) > 1 and not rules.layerwise:
        return False
    if rules.own_stages and own_stage_refusal(model.config, plan):
        return False
    pipeline = (plan.pp, plan.cp, plan.schedule_name)
    return all(trainer_runs(rules, job, *pipeline, own) for own in strategies)


def lacking(rules: Trainer, job: Entries, spaces: Sequence[Any]) -> str:
    """Return a clause with the rule that refuses most strategies of outer spaces, or nothing."""
    found: Counter[str] = Counter()
    for space in spaces:
        if rules.own_stages and max(space.num_micro_batches) < space.pp - 1:
            found[f"pp above 1, {rules.own_stages}"] += len(space.choices)
        schedule = space.schedule or usual_schedule(space.virtual_stages)
        for choice in space.choices:
            given = facts(job, space.pp, space.cp, schedule, choice)
            found.update(lack.sentence(given) for lack in rules.lacks if lack.holds(given))
    if not found:
        return ""
    return f": {max(found, key=lambda why: (found[why], ' with ' in why))}"


def trainer_parts(config: Config, choices: Strategies) -> list[Strategies]:
    """Return the largest sets of strategies that the trainer's layers may have next to each other.

    A trainer of layer-wise plans (`whole_ends: always`, Galvatron) has one switch for sequence
    parallelism, and one type of data parallelism next to ZeRO-3.
    """
    if config.space.kind == "uniform" or config.rules.whole_ends != "always":
        return [choices]
    parts = [
        _part(choices, sequence_parallel, zero_stage)
        for sequence_parallel in (True, False)
        for zero_stage in (0, 2)
    ]
    distinct = [part for part in dict.fromkeys(parts) if part]
    return [own for own in distinct if not any(set(own) < set(other) for other in distinct)]


def _part(choices: Strategies, sequence_parallel: bool, zero_stage: int) -> Strategies:
    """Keep one setting of sequence parallelism, and one ZeRO stage next to 3."""
    return tuple(
        own
        for own in choices
        if own.sequence_parallel == (own.tp > 1 and sequence_parallel)
        and own.zero_stage in (zero_stage, 3)
    )
