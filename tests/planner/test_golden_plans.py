"""Three of the golden commands; `python -m tests.support.golden_plans` runs all."""

import json

import pytest

from tests.support.commands import Command
from tests.support.golden_plans import agree, golden_rows, recorded


@pytest.mark.parametrize("name", ["toy_moe", "toy_mixed", "searcher_gpt2"])
def test_a_golden_command_finds_its_plan(command: Command, name: str) -> None:
    row = golden_rows()[name]
    assert command(*row["arguments"].split(), "output.tensorboard=false").status == 0
    found = recorded(name, row["arguments"], json.loads(command.plan_file().read_text()))
    assert agree(found, row), (found, row)
