"""`python -m darts_parallel.export plan.json --to megatron [--output FILE]`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from darts_parallel.errors import ConfigError, DartsParallelError, begin_command, one_line
from darts_parallel.export import TARGETS, export_lines, export_plan, write_export
from darts_parallel.plans import check_plan, read_own_problem, read_phases, read_plan


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"export: {message}; try export plan.json --to megatron.")


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the plan for a trainer; returns the exit status, 2 with one sentence for a refusal."""
    begin_command()
    parser = _Parser(prog="python -m darts_parallel.export", description=__doc__)
    parser.add_argument("plan", help="a plan.json of the command")
    parser.add_argument("--to", required=True, choices=sorted(TARGETS), help="the trainer")
    parser.add_argument("--output", type=Path, help="the (main) file; default: next to the plan")
    try:
        given = parser.parse_args(arguments)
        problem = read_own_problem(given.plan)
        plan = read_plan(given.plan, problem.model)
        check_plan(plan, problem.model, problem.cluster, problem.training, problem.measured)
        phases = read_phases(given.plan)
        exported = export_plan(problem, plan, given.to, phases=phases)
        paths = write_export(exported, Path(given.plan).parent, given.output)
    except DartsParallelError as error:
        print(f"darts-parallel: {one_line(str(error))}", file=sys.stderr)
        return 2
    print("\n".join(export_lines(given.to, exported, paths)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
