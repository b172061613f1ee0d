"""Compare all methods: how far from the best known plan, and at what cost."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from baselines import PLANNERS
from experiments.comparison.quantiles import EXACT, percent, quantile, read_curve
from experiments.comparison.runs import AUTO, ORACLE, SEARCH, UNIFORM, MethodRun

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


def best_known(runs: Sequence[MethodRun]) -> dict[str, float]:
    """Return the least seconds per iteration of each problem that any method found."""
    return {
        name: min(run.iteration_time_s for run in runs if run.problem == name)
        for name in dict.fromkeys(run.problem for run in runs)
    }


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
        missing = str(len(self.gaps) - len(found)) if len(found) < len(self.gaps) else "-"
        exact = sum(gap < EXACT for gap in self.gaps)
        spread = (
            [percent(quantile(found, share)) for share in (50, 95, 100)] if found else ["-"] * 3
        )
        return [
            self.method,
            str(len(self.gaps)),
            missing,
            str(exact),
            *spread,
            f"{self.seconds:.2f}",
            f"{self.evaluations:.0f}",
        ]


def standings(runs: Sequence[MethodRun]) -> list[Standing]:
    """Summarize every method that ran, the exact ones first, then the gradient search, then the rivals."""
    best = best_known(runs)
    result = []
    for method in (AUTO, ORACLE, UNIFORM, SEARCH, *PLANNERS):
        mine = [run for run in runs if run.method == method]
        if not mine:
            continue
        seconds, plans = (
            quantile([float(getattr(run, key)) for run in mine], 50)
            for key in ("seconds", "evaluations")
        )
        columns = {method: "iteration_time_s"} | ({RAW: "raw_time_s"} if method == SEARCH else {})
        for name, column in columns.items():
            times: dict[str, list[float]] = defaultdict(list)
            for run in mine:
                times[run.problem].append(getattr(run, column))
            gaps = tuple(quantile(own, 50) / best[problem] - 1.0 for problem, own in times.items())
            result.append(Standing(name, gaps, seconds, plans))
    return result


def duels(runs: Sequence[MethodRun]) -> list[str]:
    """Compare the gradient search with each random rival at equal wall-clock, a sentence each.

    Every rival's curve is read at the gradient search's median seconds on the same problem; problems are
    compared by medians over seeds.
    """
    lines = []
    for name in (name for name, rival in PLANNERS.items() if rival.seeded):
        counts = {"better": 0, "equal": 0, "worse": 0}
        worse = []
        for problem in dict.fromkeys(run.problem for run in runs):
            mine = [run for run in runs if run.problem == problem and run.method == SEARCH]
            theirs = [run.curve for run in runs if run.problem == problem and run.method == name]
            if not mine or not theirs:
                continue
            seconds = quantile([run.seconds for run in mine], 50)
            rival = quantile([read_curve(curve, seconds) for curve in theirs], 50)
            own = quantile([run.iteration_time_s for run in mine], 50)
            slack = rival * EXACT if rival < float("inf") else 0.0
            verdict = (
                "better" if own < rival - slack else "worse" if own > rival + slack else "equal"
            )
            counts[verdict] += 1
            worse += [f"{problem} by {percent(own / rival - 1.0)}"] if verdict == "worse" else []
        if sum(counts.values()):
            names = f"; worse on {', '.join(worse)}" if worse else ""
            lines.append(
                f"- gradient search against {name} at the gradient search's own seconds: better on "
                f"{counts['better']}, equal on {counts['equal']}, worse on {counts['worse']} problems{names}."
            )
    return lines


def default_verdict(runs: Sequence[MethodRun]) -> list[str]:
    """Say where the default is worse than another method, or slower than the slowest that is as good.

    A method with seeds counts by its medians. Where no other method reaches the default's plan, no time
    is there to compare with.
    """
    mine = {run.problem: run for run in runs if run.method == AUTO}
    beaten, slower = [], []
    for name, own in mine.items():
        others = {
            run.method for run in runs if run.problem == name and run.method not in (AUTO, ORACLE)
        }
        found = {
            method: [run for run in runs if run.problem == name and run.method == method]
            for method in others
        }
        times = {
            method: quantile([run.iteration_time_s for run in rows], 50)
            for method, rows in found.items()
        }
        best = min(times, key=lambda method: times[method], default=None)
        if best is not None and times[best] < own.iteration_time_s * (1.0 - EXACT):
            beaten.append(f"{name} by {percent(own.iteration_time_s / times[best] - 1.0)} ({best})")
        equal = [
            method for method in others if times[method] <= own.iteration_time_s * (1.0 + EXACT)
        ]
        slowest = max(
            (quantile([run.seconds for run in found[m]], 50) for m in equal), default=float("inf")
        )
        if own.seconds > slowest:
            slower.append(f"{name} ({own.seconds:.1f} s against {slowest:.1f} s)")
    if not mine:
        return []
    count = f"{len(mine) - len(beaten)} of {len(mine)} problems"
    return [
        f"- `search=auto` has the best plan on {count}"
        + (f"; worse on {', '.join(beaten)}" if beaten else "")
        + ".",
        f"- it needs more seconds than the slowest method with an equal plan on {len(slower)} problems"
        + (f": {', '.join(slower)}" if slower else "")
        + ".",
    ]
