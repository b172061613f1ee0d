"""Price the failures of a cluster for a plan, and plan the job on fewer nodes to go on with."""

from dataclasses import dataclass, replace

from darts_parallel.planner.failing_job import failing_job
from darts_parallel.planner.memory_chance import tightened
from darts_parallel.planner.node_choice import smaller_plans
from darts_parallel.problem import Goodput, Problem, best_spares, goodput

DAY = 86400.0


@dataclass(frozen=True)
class FailureCosts:
    """Useful tokens of a plan on nodes that fail."""

    shares: Goodput
    """Shares of the time."""
    tokens_per_s: float
    """Useful ones."""
    num_tokens: float
    """Tokens of the job; 10^12 without `objective.num_iterations`."""
    days: float | None
    """Until the job has them; None where less than a useful token a second is left."""
    spare_nodes: int
    best_spare_nodes: int
    """With most useful tokens a node."""


def failure_costs(problem: Problem, seconds: float) -> FailureCosts | None:
    """Return the cost of failures for a plan of some seconds; None where the job has no failures."""
    job = failing_job(problem, problem.cluster)
    if job is None:
        return None
    job = replace(job, smaller=smaller_plans(tightened(problem), job.nodes, seconds))
    shares = goodput(job)
    tokens_per_s = problem.tokens_per_iteration / seconds * shares.useful
    iterations = problem.config.objective.num_iterations
    num_tokens = iterations * problem.tokens_per_iteration if iterations else 1e12
    days = None if tokens_per_s < 1.0 else num_tokens / tokens_per_s / DAY
    return FailureCosts(
        shares,
        tokens_per_s,
        num_tokens,
        days,
        job.spares,
        best_spares(job),
    )
