"""Two lines on what failures cost."""

from darts_parallel.planner import FailureCosts
from darts_parallel.report.format import percent


def failure_lines(costs: FailureCosts) -> tuple[str, str]:
    """Return the time that is left and until when; then how often to checkpoint, and where time goes."""
    shares = costs.shares
    minutes = shares.checkpoint_interval_s / 60.0
    parts = [
        f"checkpoint every {minutes:,.1f} min {percent(shares.checkpoints)}",
        f"lost {percent(shares.lost_work)}",
        f"restarts {percent(shares.restarts)}",
        f"waiting {percent(shares.waiting)}",
    ]
    if shares.smaller is not None:
        parts.append(f"on {shares.smaller.nodes} nodes {percent(shares.training_on_fewer_nodes)}")
    left = f"failures leave {percent(shares.useful)}: {costs.tokens_per_s:,.0f} tokens/s"
    days = "never done"
    if costs.days is not None:
        days = f"{costs.days:,.1f} days for {costs.num_tokens / 1e12:,.3g} trillion tokens"
    spares = f"spare nodes: {costs.spare_nodes}, best {costs.best_spare_nodes}"
    return f"{left} · {days} · {spares}", " · ".join(parts)
