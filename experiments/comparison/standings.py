"""Compare all methods: how far from the best known plan, and at what cost."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from baselines import PLANNERS
from experiments.comparison.quantiles import EXACT, percent, quantile, read_curve
from experiments.comparison.runs import (
    AUTO,
    ORACLE,
    SEARCH,
    UNIFORM,
    MethodRun,
    best_known,
    grouped,
    median_of,
    median_time,
)

HEADER = (
    "method",
    "problems",
    "no plan",
    "best",
    "median",
    "95 %",
    "largest",
    "median s",
    "median plans",
)
RAW = "gradient_search, raw"


@dataclass(frozen=True)
class Standing:
    """Summarize one method over all problems; each problem counts by the median of its seeds."""

    method: str
    gaps: tuple[float, ...]
    """Gaps to the best known plan, one for each problem; infinite without a plan."""
    seconds: float
    """Median seconds over all runs."""
    evaluations: float

    def cells(self) -> list[str]:
        """Return one row of the table, as `HEADER`."""
        found = [gap for gap in self.gaps if gap < float("inf")]
        missing = len(self.gaps) - len(found)
        exact = sum(gap < EXACT for gap in self.gaps)
        cells = [self.method, str(len(self.gaps)), str(missing or "-"), str(exact)]
        for share in (50, 95, 100):
            cells.append(percent(quantile(found, share)) if found else "-")
        return [*cells, f"{self.seconds:.2f}", f"{self.evaluations:.0f}"]


def standings(runs: Sequence[MethodRun]) -> list[Standing]:
    """Summarize every method that ran: the exact ones, then the gradient search, then the rivals."""
    best = best_known(runs)
    methods = grouped(runs, "method")
    if SEARCH in methods:
        methods[RAW] = [
            replace(run, iteration_time_s=run.raw_time_s)
            for run in methods[SEARCH]
            if run.raw_time_s is not None
        ]
    result = []
    for method in (AUTO, ORACLE, UNIFORM, SEARCH, RAW, *PLANNERS):
        if method in methods:
            rows = methods[method]
            problems = grouped(rows, "problem").items()
            gaps = tuple(median_time(own) / best[problem] - 1.0 for problem, own in problems)
            seconds = median_of(rows, "seconds")
            result.append(Standing(method, gaps, seconds, median_of(rows, "evaluations")))
    return result


def duels(runs: Sequence[MethodRun]) -> list[str]:
    """Compare the gradient search with each random rival at equal wall-clock, a sentence each.

    Every rival's curve is read at the gradient search's median seconds on the same problem; problems are
    compared by medians over seeds.
    """
    lines = []
    for name, rival in PLANNERS.items():
        if rival.seeded:
            lines += _duel(name, runs)
    return lines


def _duel(rival: str, runs: Sequence[MethodRun]) -> list[str]:
    counts = {"better": 0, "equal": 0, "worse": 0}
    lost = []
    for problem, rows in grouped(runs, "problem").items():
        methods = grouped(rows, "method")
        if SEARCH not in methods or rival not in methods:
            continue
        own = median_time(methods[SEARCH])
        seconds = median_of(methods[SEARCH], "seconds")
        theirs = quantile([read_curve(run.curve, seconds) for run in methods[rival]], 50)
        outcome = _outcome(own, theirs)
        counts[outcome] += 1
        if outcome == "worse":
            lost.append(f"{problem} by {percent(own / theirs - 1.0)}")
    if not sum(counts.values()):
        return []
    told = ", ".join(f"{outcome} on {count}" for outcome, count in counts.items())
    names = f"; worse on {', '.join(lost)}" if lost else ""
    begin = f"- gradient search against {rival} at the gradient search's own seconds"
    return [f"{begin}: {told} problems{names}."]


def _outcome(own: float, rival: float) -> str:
    if abs(own - rival) <= rival * EXACT < float("inf"):
        return "equal"
    return "better" if own < rival else "worse"


def default_verdict(runs: Sequence[MethodRun]) -> list[str]:
    """Say where the default is worse than another method, or slower than the slowest that is as good.

    A method with seeds counts by its medians. Where no other method reaches the default's plan, no time
    is there to compare with.
    """
    worse: list[str] = []
    slower: list[str] = []
    defaults = {run.problem: run for run in runs if run.method == AUTO}
    if not defaults:
        return []
    rivals = [run for run in runs if run.method not in (AUTO, ORACLE)]
    for problem, rows in grouped(rivals, "problem").items():
        if problem in defaults:
            others = list(grouped(rows, "method").values())
            worse += _better_plan(defaults[problem], others)
            slower += _faster_method(defaults[problem], others)
    good = f"{len(defaults) - len(worse)} of {len(defaults)} problems"
    losses = f"; worse on {', '.join(worse)}" if worse else ""
    delays = f": {', '.join(slower)}" if slower else ""
    return [
        f"- `search=auto` has the best plan on {good}{losses}.",
        f"- it needs more seconds than the slowest method with an equal plan on {len(slower)} "
        f"problems{delays}.",
    ]


def _better_plan(own: MethodRun, others: Sequence[list[MethodRun]]) -> list[str]:
    best = min(others, key=median_time)
    time = median_time(best)
    if time >= own.iteration_time_s * (1.0 - EXACT):
        return []
    return [f"{own.problem} by {percent(own.iteration_time_s / time - 1.0)} ({best[0].method})"]


def _faster_method(own: MethodRun, others: Sequence[list[MethodRun]]) -> list[str]:
    limit = own.iteration_time_s * (1.0 + EXACT)
    equal = [median_of(rows, "seconds") for rows in others if median_time(rows) <= limit]
    slowest = max(equal, default=float("inf"))
    if own.seconds <= slowest:
        return []
    return [f"{own.problem} ({own.seconds:.1f} s against {slowest:.1f} s)"]
