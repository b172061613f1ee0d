"""A job on nodes that fail."""

from darts_parallel.cost import state_bytes
from darts_parallel.problem import Cluster, FailingJob, Problem


def failing_job(problem: Problem, cluster: Cluster) -> FailingJob | None:
    """Return a job that waits for repairs; None where failures are not considered."""
    known = cluster.failures
    if known is None:
        return None
    training = problem.training
    state = state_bytes(training.precision, training.optimizer)
    size = known.checkpoint
    if size is None:
        size = problem.model.num_trained_parameters * (state.parameter + state.optimizer)
    nodes = len(cluster.node_types)
    node_rate = cluster.num_devices / nodes / known.gpu_mtbf
    write = size / known.write_bandwidth
    return FailingJob(nodes, node_rate, write, known.restart, known.repair, known.spare_nodes)
