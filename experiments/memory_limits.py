"""Check that a looser limit on the chance of running out of memory never gives a slower or a riskier plan.

    python -m experiments.memory_limits                     # 40 problems x 11 limits, some 20 minutes
    python -m experiments.memory_limits 'problems=[T5 8]'   # of some jobs

Each job runs on four sizes of memory, as shares of what its fastest plan needs. `search=exact` must give
seconds and chances that follow the limit. The plan of the descent, before the rule for ties, may
be 1 % slower than at a stricter limit.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, product
from math import inf
from operator import attrgetter

from darts_parallel import evaluate, load_problem, plan
from darts_parallel.config import one_of, read_yaml, run_main
from darts_parallel.planner import plan_at_limits
from darts_parallel.report import markdown_table
from experiments.data import DATA
from experiments.study import Study, StudyOptions, report_text, run_study

JOBS: dict[str, str] = read_yaml(DATA / "problems.yaml")["limits"]
"""Overrides by name."""
SHARES = (0.75, 0.95, 1.15, 1.4)
"""Memory of a device, in peaks of the fastest plan."""
LIMITS = (1e-3, 3e-3, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5)
"""Values of `space.out_of_memory`, strictest first."""
SEARCHES = {
    "exact": ("search=exact", "verification.enabled=false"),
    "descent": ("search.tie=0", "search.num_steps=100", "search.num_restarts=8"),
}
"""Overrides of both searches."""
ALLOWED = {"exact": 1e-9, "descent": 0.01}
"""Relative seconds that a plan may take above one at a stricter limit."""
ROUNDING = 1e-9
"""Difference of chances below which they are equal."""
DESCENT_SHARES = SHARES[1:3]
"""Sizes of memory at which the descent runs: the others give it nothing to decide."""


@dataclass
class LimitOptions(StudyOptions):
    """Command line of `python -m experiments.memory_limits`."""

    jobs: int = 1
    problems: list[str] = one_of(list(JOBS), tuple(JOBS))
    """Names of jobs; each is planned on all sizes of memory."""


@dataclass(frozen=True)
class LimitRow:
    """The plan of one search at one limit."""

    job: str
    share: float
    """Memory, in peaks of the fastest plan."""
    search: str
    limit: float
    seconds: float = inf
    """Per iteration; infinite where no plan fits."""
    chance: float = 1.0
    kept: bool = False
    """Whether the plan keeps the limit."""


def rows_of_job(task: tuple[str, float]) -> list[LimitRow]:
    """Plan a job on one size of memory at every limit; searches do not know the limit, so each runs once."""
    name, share = task
    job = JOBS[name].split()
    roomy = load_problem([*job, *SEARCHES["exact"], "space.out_of_memory=0.5"])
    peak = max(evaluate(plan(roomy).plan, roomy).memory_bytes)
    sizes = [f"cluster.devices.{own.device.name}.memory_GiB" for own in roomy.cluster.groups]
    memory = [f"{key}={share * peak / 2**30:.4f}" for key in dict.fromkeys(sizes)]
    rows = []
    for search, given in SEARCHES.items():
        if search == "exact" or share in DESCENT_SHARES:
            problem = load_problem([*job, *given, *memory])
            for limit, found in zip(LIMITS, plan_at_limits(problem, LIMITS), strict=True):
                row = LimitRow(name, share, search, limit)
                if found is None:
                    rows.append(row)
                    continue
                seconds = found.result.iteration_time_s if found.result else 0.0
                chance = found.out_of_memory or 0.0
                rows.append(replace(row, seconds=seconds, chance=chance, kept=not found.warning))
    return rows


def violations(rows: Sequence[LimitRow]) -> Iterator[str]:
    """Yield, for one search of one problem, the limits at which a plan is slower or safer than before."""
    best = before = rows[0]
    for row in rows[1:]:
        slower = row.seconds / best.seconds - 1.0 if best.kept else 0.0
        if slower > ALLOWED[row.search]:
            yield f"{row.limit:g} is {100 * slower:.2f} % slower than {best.limit:g}"
        falls = row.chance < before.chance - ROUNDING and row.kept == before.kept
        if row.search == "exact" and falls:
            yield f"{row.limit:g} is safer than {before.limit:g}"
        before = row
        if row.seconds < best.seconds or not best.kept:
            best = row


def report(rows: Sequence[LimitRow]) -> str:
    """Return a line a problem and search."""
    cells = []
    found = []
    for (job, share, search), group in groupby(rows, key=attrgetter("job", "share", "search")):
        own = list(group)
        wrong = list(violations(own))
        found += [f"- {job}, {share:g}, {search}: {words}" for words in wrong]
        seconds = " to ".join(f"{row.seconds:.4g}" for row in (own[0], own[-1]))
        chances = " to ".join(f"{row.chance:.1g}" for row in (own[0], own[-1]))
        kept = sum(row.kept for row in own)
        cells.append((job, f"{share:g}", search, seconds, chances, f"{kept}", f"{len(wrong)}"))
    header = ("job", "memory", "search", "seconds", "chances", "limits kept", "violations")
    verdict = f"{len(found)} violations in {len(cells)} rows of {len(LIMITS)} limits each."
    return report_text(verdict, markdown_table(header, cells, (0, 2)), found)


def run(options: LimitOptions) -> int:
    """Plan all problems; returns the exit status."""
    study = Study(
        "memory_limits",
        "Is a plan never slower nor riskier where more risk is allowed?",
        "larger jobs, whose exact searches take minutes; whether the chances are true.",
        rows_of_job,
        report,
    )
    pairs = product(options.problems, SHARES)
    return run_study(study, {f"{name}, {share:g}": (name, share) for name, share in pairs}, options)


if __name__ == "__main__":
    raise SystemExit(run_main("experiments.memory_limits", run))
