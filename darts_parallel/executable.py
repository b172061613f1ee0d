"""What `darts_parallel.run` can execute, and one sentence for what it cannot."""

from darts_parallel.config import COMM_BITS
from darts_parallel.errors import UnsupportedError
from darts_parallel.plan_check import check_plan
from darts_parallel.problem import Problem
from darts_parallel.strategy import Plan


def refuse_unexecutable(plan: Plan, problem: Problem) -> None:
    """Refuse a plan that `darts_parallel.run` cannot execute, before any process starts.

    Errors:
        PlanError: the plan does not belong to the problem.
        UnsupportedError: names what cannot run and the nearest plan that can.
    """
    refuse_model(problem)
    if plan.cp > 1:
        raise UnsupportedError(f"plan: cp={plan.cp} cannot run here yet; nearest legal: 1 (space.cp=1).")
    if plan.node_order:
        raise UnsupportedError(
            f"plan: node_order={list(plan.node_order)} cannot run, since whoever starts the processes "
            "numbers them; nearest legal: space.node_orders=given."
        )
    check_plan(plan, problem)
    exact = max(COMM_BITS)
    for spec, strategy in zip(problem.model.layers, plan.layers, strict=True):
        for key in ("tp_comm_bits", "grad_comm_bits"):
            bits = getattr(strategy, key)
            if bits < exact:
                raise UnsupportedError(
                    f"plan: {spec.name} has {key}={bits}, but collectives send whole numbers here; nearest "
                    f"legal: {exact} (space.{key}={exact})."
                )
        if strategy.sequence_parallel and not sequence_divides(problem, strategy.tp):
            raise UnsupportedError(
                f"plan: {spec.name} has sequence_parallel=true with tp={strategy.tp}, which must divide "
                f"training.seq_len={problem.training.seq_len}; nearest legal: sequence_parallel=false."
            )


def refuse_model(problem: Problem) -> None:
    """Refuse a model that `darts_parallel.run` does not build.

    Errors:
        UnsupportedError: names the key.
    """
    config = problem.model.config
    for key in ("num_encoder_layers", "relative_position_buckets"):
        value = getattr(config, key)
        if value:
            raise UnsupportedError(
                f"model={config.name} has model.{key}={value}, and only one chain of blocks can run here; "
                "nearest legal: 0."
            )


def sequence_divides(problem: Problem, tp: int) -> bool:
    """Whether sequence parallelism gives every rank an equal run of the sequence."""
    return problem.training.seq_len % tp == 0
