"""Every legal value of every key of the space, once: a plan, or a sentence that names the key."""

from dataclasses import fields

import pytest

from darts_parallel.config.schema import SpaceConfig
from tests.support.commands import QUIET, Command
from tests.support.space_values import NULL, VALUES, overrides, rows_of_key


def test_every_key_has_values() -> None:
    assert set(VALUES) == {entry.name for entry in fields(SpaceConfig)}


@pytest.mark.parametrize("key", VALUES)
def test_every_legal_value_is_planned_or_refused_by_its_key(command: Command, key: str) -> None:
    """Each value meets the row of one trainer (`Command`); all pairs: `space_values`."""
    free = ("null",) if key in NULL else ()
    for value in (*VALUES[key], *free):
        given = f"space.{key}={value}"
        done = command(*overrides(key, str(value)), *QUIET, f"hydra.run.dir=run_{value}")
        if done.status == 0:
            assert f"run_{value}/plan.json" in done.files, given
            assert "is missing" not in done.out, done.out
            continue
        assert done.status == 2, given
        assert f"space.{key}" in done.err, done.err
        assert done.err.count("\n") == 1
        assert "; " in done.err, done.err


def test_a_row_of_a_trainer_has_files_or_a_refusal_that_names_key_or_trainer() -> None:
    rows = rows_of_key(("pp", "megatron"))
    assert [row.value for row in rows] == ["1", "2", "4"]
    assert [bool(row.refusal) for row in rows] == [False, False, True]
    assert rows[-1].named
    assert rows[-1].refusal.startswith("space.pp=4 ")
