"""Settings that are refused together: the table `rules.yaml` next to this file, and its reader."""

from functools import reduce
from itertools import product
from typing import Any

from darts_parallel.config.checks import as_yaml, require
from darts_parallel.config.trainer import matches, module_data

RULES = module_data(__file__)
"""Entries by the group of their keys; `rules.yaml` explains them."""


def check_rules(group: str, config: Any) -> None:
    """Refuse the first settings that do not go together.

    Args:
        group: Key of the rules: a group of the configuration; `job` and `design` for all groups.
        config: The dataclass of that group, or the whole configuration.

    Errors:
        ConfigError: names a key, its value, the rule and what to try.
    """
    for rule in RULES[group]:
        for key, (words, when) in product(rule["keys"], rule["must"].items()):
            wanted = {key: rule.get("value", "some"), **when}
            if all(matches(value_at(config, name), own) for name, own in wanted.items()):
                whole = key if "." in key else f"{group}.{key}"
                named = rule.get("setting", "").format(this=config)
                setting = named or f"{whole}={as_yaml(value_at(config, key))}"
                texts = (words.format(this=config), rule["near"].format(this=config))
                require(False, setting, *texts)


def value_at(config: Any, key: str) -> Any:
    """Return the value at a dotted key; null of what a mapping has not."""

    def inside(place: Any, part: str) -> Any:
        return place.get(part) if isinstance(place, dict) else getattr(place, part)

    return reduce(inside, key.split("."), config)
