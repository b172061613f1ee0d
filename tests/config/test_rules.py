"""The table of settings that are refused together: each entry refuses, and only where all of it holds."""

from types import SimpleNamespace
from typing import Any

import pytest

from darts_parallel.config import (
    BilevelConfig,
    ClusterConfig,
    Config,
    ModelConfig,
    TrainingConfig,
)
from darts_parallel.config._keys import plain_type
from darts_parallel.config.rules import RULES, check_rules
from darts_parallel.config.schema import CostConfig, ObjectiveConfig, SpaceConfig
from darts_parallel.config.trainer import matches
from darts_parallel.errors import ConfigError

GROUPS: dict[str, Any] = {
    "model": ModelConfig,
    "training": TrainingConfig,
    "cluster": ClusterConfig,
    "space": SpaceConfig,
    "cost": CostConfig,
    "objective": ObjectiveConfig,
    "bilevel": BilevelConfig,
    "design": Config,
    "job": Config,
}
CASES = [
    (group, rule, key, words)
    for group, rules in RULES.items()
    for rule in rules
    for key in rule["keys"]
    for words in rule["must"]
]
OTHER = {"some": None, "none": 1}
"""Values that do not match a word."""


class Anything(SimpleNamespace):
    """A configuration whose further keys are null, at any depth."""

    def __getattr__(self, name: str) -> Any:
        return Anything()

    def __bool__(self) -> bool:
        return bool(vars(self))


def a_match(wanted: Any) -> Any:
    if isinstance(wanted, dict):
        return "other"
    if isinstance(wanted, list):
        return wanted[0]
    return {"some": 1, "none": None}[wanted]


def no_match(wanted: Any) -> Any:
    if isinstance(wanted, dict):
        return wanted["not"][0]
    return "other" if isinstance(wanted, list) else OTHER[wanted]


def with_values(values: dict[str, Any]) -> Anything:
    config = Anything()
    for key, value in values.items():
        *path, last = key.split(".")
        place = config
        for part in path:
            place = vars(place).setdefault(part, Anything())
        setattr(place, last, value)
    return config


def refused(rule: dict[str, Any], group: str, values: dict[str, Any]) -> str:
    """Return the sentence of one entry for some values; empty where it lets them pass."""
    every = RULES[group]
    RULES[group] = [rule]
    try:
        check_rules(group, with_values(values))
    except ConfigError as error:
        return str(error)
    finally:
        RULES[group] = every
    return ""


@pytest.mark.parametrize(("group", "rule", "key", "words"), CASES)
def test_an_entry_refuses_where_all_of_it_holds(
    group: str, rule: dict[str, Any], key: str, words: str
) -> None:
    when = rule["must"][words]
    alone = {**rule, "keys": [key], "must": {words: when}}
    wanted = {key: rule.get("value", "some")} | when
    values = {name: a_match(own) for name, own in wanted.items()}
    sentence = refused(alone, group, values)
    assert " must " in sentence
    assert "; try " in sentence
    for name, own in wanted.items():
        assert refused(alone, group, values | {name: no_match(own)}) == "", name


@pytest.mark.parametrize(("group", "rule", "key", "words"), CASES)
def test_the_keys_of_an_entry_exist(group: str, rule: dict[str, Any], key: str, words: str) -> None:
    for name in (key, *rule["must"][words]):
        kind = GROUPS[group]
        for part in name.split("."):
            if isinstance(kind, type) and kind is dict:
                break
            known = {entry.name: entry.type for entry in kind.__dataclass_fields__.values()}
            assert part in known or isinstance(getattr(kind, part), property), name
            kind = plain_type(known.get(part))
            kind = dict if getattr(kind, "__origin__", None) is dict else kind


def test_signs_in_a_value_are_no_places_of_a_sentence() -> None:
    rule = {"keys": ["offload"], "must": {"be null": {}}, "near": "null"}
    sentence = refused(rule, "space", {"offload": {"optimizer": 1.0}})
    assert sentence == "space.offload={'optimizer': 1.0} must be null; try null."


@pytest.mark.parametrize(
    ("value", "wanted", "expected"),
    [
        (0, "some", False),
        ([], "some", False),
        (0.5, "some", True),
        (None, "none", True),
        (1, "many", False),
        (2, "many", True),
        (8, [4, 8], True),
        ([2, 8], [4, 8], True),
        ([2], [4, 8], False),
        ([1, 2], {"not": [1]}, True),
        ([1], {"not": [1]}, False),
        ((1,), {"not": [1]}, False),
        (None, {"not": [1]}, True),
    ],
)
def test_what_a_rule_wants(value: Any, wanted: Any, expected: bool) -> None:
    assert matches(value, wanted) == expected
