"""What each trainer runs of the search space: the restrictions behind `space.trainer`.

All of them are of one strategy for all layers. The exports (`darts_parallel/export`) check every plan anew;
here stands what a search must leave out so that its plan passes.
"""

from dataclasses import dataclass

from darts_parallel.config.layer_pattern import MAMBA
from darts_parallel.config.schema import COMM_BITS, RECOMPUTE
from darts_parallel.plan.strategy import LayerStrategy
from darts_parallel.problem.problem import Problem
from darts_parallel.schedules import RUNNABLE, USUAL


@dataclass(frozen=True)
class Trainer:
    """The degrees and settings that a trainer has at all; the defaults are Megatron-LM's."""

    zero_stages: tuple[int, ...] = (0, 1, 2, 3)
    recompute: tuple[str, ...] = RECOMPUTE
    sequence_parallel: bool = True
    pipeline: bool = True
    interleaved: bool = False
    context_parallel: bool = False
    shard_groups: bool = False
    """Hybrid sharding: groups smaller than all data-parallel ranks."""


WHOLE_LAYERS = ("none", "full")
"""Recomputation where a trainer recomputes layers whole or not at all."""
TRAINERS: dict[str, Trainer] = {
    "megatron": Trainer(interleaved=True, context_parallel=True, shard_groups=True),
    "torchtitan": Trainer(recompute=WHOLE_LAYERS, interleaved=True, context_parallel=True, shard_groups=True),
    "deepspeed": Trainer(recompute=WHOLE_LAYERS, sequence_parallel=False),
    "accelerate": Trainer(
        (0, 2, 3),
        WHOLE_LAYERS,
        sequence_parallel=False,
        pipeline=False,
        context_parallel=True,
        shard_groups=True,
    ),
    "nanotron": Trainer((0, 1), WHOLE_LAYERS, pipeline=False),  # it cuts a pipeline by a rule of its own
    "galvatron": Trainer((0, 2, 3), WHOLE_LAYERS, context_parallel=True),
    "torch": Trainer(recompute=WHOLE_LAYERS, interleaved=True),
}


def trainer_schedules(problem: Problem, schedule: str | None) -> bool:
    """Whether `space.trainer` runs a pipeline schedule; None stands for 1F1B or interleaved 1F1B."""
    name = problem.config.space.trainer
    return name is None or schedule in (None, *(RUNNABLE if name == "torchtitan" else USUAL))


def trainer_runs(problem: Problem, pp: int, cp: int, virtual_stages: int, strategy: LayerStrategy) -> bool:
    """Whether `space.trainer` runs this strategy for all layers under these outer degrees; true without one.

    Args:
        problem: Model, job and space.
        pp: Pipeline degree.
        cp: Context-parallel degree.
        virtual_stages: Model chunks of a stage.
        strategy: Of every layer.
    """
    name = problem.config.space.trainer
    if name is None:
        return True
    rules, ranks = TRAINERS[name], strategy.dp * cp
    sharded = (strategy.shard_size or ranks) if strategy.zero_stage else ranks
    return (
        strategy.zero_stage in rules.zero_stages
        and strategy.recompute in rules.recompute
        and (rules.sequence_parallel or not strategy.sequence_parallel)
        and (rules.pipeline or pp == 1)
        and (rules.interleaved or virtual_stages == 1)
        and (rules.context_parallel or cp == 1)
        and (rules.shard_groups or sharded == ranks)
        and min(strategy.tp_comm_bits, strategy.grad_comm_bits) == max(COMM_BITS)
        and _together(name, problem, pp, cp, strategy)
        and _runs_model(name, problem, pp, strategy)
        and (name not in ("torchtitan", "accelerate") or sharded % cp == 0)
    )


def _together(name: str, problem: Problem, pp: int, cp: int, strategy: LayerStrategy) -> bool:
    """Whether the trainer runs the degrees beside each other."""
    zero = strategy.zero_stage
    if name == "megatron":
        adam = problem.training.optimizer == "adam"
        return (zero < 2 or pp == 1) and (zero == 0 or adam)
    if name == "torchtitan":
        # PyTorch's pipelines keep the gradients and parameters of a stage whole, whatever sharding says
        shards = (2, 3) if pp == 1 else (1,)
        known = zero in shards or (zero == 0 and cp == 1)
        return known and (pp == 1 or not problem.model.config.tie_embeddings)
    if name == "deepspeed":
        return pp == 1 or (strategy.tp == 1 and zero < 2)
    if name == "accelerate":
        return zero > 0 or (cp == 1 and (strategy.dp == 1 or strategy.tp == 1))
    return True


def _runs_model(name: str, problem: Problem, pp: int, strategy: LayerStrategy) -> bool:
    """Whether a trainer that is handed the model runs what the model and the job have under the strategy.

    Trainers with models of their own refuse a model whatever the strategy, before the search.
    """
    model = problem.model.config
    if name == "deepspeed":
        whole = problem.model.has_experts or model.num_encoder_layers > 0 or problem.training.lora_rank > 0
        if pp > 1 and whole:
            return False
        if problem.model.has_experts and (strategy.zero_stage > 2 or max(strategy.tp, strategy.etp) > 1):
            return False
    handed = name in ("deepspeed", "accelerate")
    return not handed or strategy.tp == 1 or MAMBA not in (model.hybrid_override_pattern or "")
