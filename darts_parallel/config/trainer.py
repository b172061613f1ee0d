"""The trainers that run plans, and what each lacks: the group `conf/trainer/`.

`trainer=NAME` sets what a file of the group says: the trainer's calibrated figures
(`training.software`), what it can run (`space.trainer`), and that the plan is written for it
(`export`). A plan's search leaves out what the trainer lacks (`plans/trainers.py`), and its
exporter refuses the same rules.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from omegaconf import MISSING

from darts_parallel.config.checks import as_yaml, one_of, ranged, require
from darts_parallel.errors import Entries, closest


def config_dir() -> Path:
    """Return the folder of the configuration files: in an installed package, or in the checkout."""
    package = Path(__file__).resolve().parent.parent
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


def group_file(group: str, name: str) -> Path:
    """Return the file that `group=NAME` reads."""
    return config_dir() / group / f"{name}.yaml"


def group_files(group: str) -> list[Path]:
    """Return the files of a group of the configuration, by name."""
    return sorted((config_dir() / group).glob("*.yaml"))


@cache
def group_names(group: str) -> list[str]:
    """Return the names that `group=NAME` may have."""
    return [path.stem for path in group_files(group)]


NONE = "none"
EXPORTS = tuple(name for name in group_names("trainer") if name != NONE)
"""Names of the trainers."""
NEWEST = tuple(name for name in EXPORTS if not name[-1].isdigit())
"""Trainers of the newest release, which reports compare; the name of another ends with its release."""
QUANTITIES = ("some", "none", "many")
"""Words for values in a rule: not 0 or empty; 0 or empty; above 1."""


def matches(value: Any, wanted: Any) -> bool:
    """Return whether a value is one that a rule wants.

    Args:
        value: Of a setting; of several values one is enough.
        wanted: One of `QUANTITIES`, a list of values, or a mapping `not` of one.
    """
    if isinstance(wanted, str):
        return value > 1 if wanted == "many" else bool(value) == (wanted == "some")
    several = value if isinstance(value, list | tuple) else [value]
    if isinstance(wanted, dict):
        return any(own not in wanted["not"] for own in several)
    return any(own in wanted for own in several)


@dataclass
class Lack:
    """A combination of settings that a trainer does not run."""

    why: str
    """Reason, a clause that follows the settings in a sentence."""
    instead: str
    """Overrides of the closest space without the combination."""
    when: Entries = field(default_factory=dict)
    """Settings and their values that are lacking together; `some` stands for all above 0, `many`
    above 1."""
    model: Entries = field(default_factory=dict)
    """Keys of the model with the values that run: one of them has another value; empty: any model."""

    def __post_init__(self) -> None:
        for key, wanted in {**self.when, **self.model}.items():
            rule = "be a list of values, some, none or many"
            words = isinstance(wanted, str)
            valid = wanted in QUANTITIES if words else isinstance(wanted, Sequence)
            require(valid, f"trainer.lacks.when.{key}={wanted}", rule, f"[{wanted}]")

    def require_settings(self, facts: Mapping[str, Any]) -> None:
        """Refuse a name that is no setting of `plans.trainers.facts`."""
        for key in {*self.when, *self.model} - facts.keys():
            rule = "name a key of the model, the training or a strategy"
            require(False, f"trainer.lacks.when.{key}", rule, closest(key, facts))

    def holds(self, facts: Mapping[str, Any]) -> bool:
        """Return whether every setting of `plans.trainers.facts` has one of the values.

        Errors:
            ConfigError: a name is no setting.
        """
        self.require_settings(facts)
        return self.may_hold(facts)

    def may_hold(self, facts: Mapping[str, Any]) -> bool:
        """Return whether the settings that are in `facts` have one of the values."""
        known = self.when.keys() & facts.keys()
        together = all(matches(facts[key], self.when[key]) for key in known)
        return together and (not self.model or bool(self._others(facts)))

    def _others(self, facts: Mapping[str, Any]) -> list[str]:
        """Return the keys of `model` that have other values, with these."""
        return [
            f"{key}={as_yaml(facts[key])}"
            for key, wanted in self.model.items()
            if not matches(facts[key], wanted)
        ]

    def sentence(self, facts: Mapping[str, Any]) -> str:
        """Return the settings with their values and the reason, as one clause."""
        settings = []
        for key in self.when:
            settings.append(FACT_WORDS.get(key, f"{key}={{}}").format(as_yaml(facts[key])))
        if self.model:
            settings.append(f"model={facts['name']} has {', '.join(self._others(facts))}")
        first, *others = settings
        beside = f" with {' and '.join(others)}" if others else ""
        return f"{first}{beside}, {self.why}"


@dataclass
class TrainerLog:
    """How a trainer prints its steps: regular expressions, where NUMBER stands for a number."""

    name: str = MISSING
    """Name of the form, for messages."""
    step: str = MISSING
    """The number of a step in its line, in units of `unit`."""
    unit: str = one_of("s", ("s", "ms", "tokens/s/GPU", "sequences/s"))
    """Unit of the number of `step`."""
    memory: str = MISSING
    """The allocator's peak; what it reserved where that is printed."""
    memory_bytes: float = ranged(1.0, 1.0, 2.0**40)
    """Bytes of the unit of `memory`."""
    batch: str = MISSING
    """The global batch."""
    batch_unit: str = one_of("sequences", ("sequences", "tokens"))
    """Unit of the number of `batch`."""


@dataclass
class Trainer:
    """Abilities of a trainer; a setting that no `lacks` names runs."""

    name: str = NONE
    """The trainer, or `none`."""
    schedules: list[str] | None = None
    """Pipeline schedules; null stands for all that PyTorch runs."""
    layerwise: bool = False
    """Whether layers may have different strategies."""
    some_blocks: str = ""
    """Blocks of every stage that alone may be recomputed, next to one strategy for all: the `first`
    ones, or `every` n-th one; empty: all or none."""
    executable: bool = False
    """Whether it is `darts_parallel.run`: it takes every plan of `space=executable`."""
    own_model: bool = True
    """Whether the model is the trainer's own; the user brings any other one."""
    own_stages: str = ""
    """Reason why only the stages run that the trainer itself cuts; empty: any stages run."""
    replicated_key_values: bool = False
    """Whether tp may be a multiple of the key-value heads, of which each rank then has a copy."""
    whole_context_groups: bool = False
    """Whether a sharding group must hold whole context-parallel groups."""
    inside_pipelines: bool = False
    """Whether the stages of a pipeline may lie in one node, and its replicas in others."""
    whole_ends: str = "never"
    """Models whose first and last stage must hold a block: `never`, `hybrids` or `always`."""
    half_blocks: bool = False
    """Whether a stage may begin between attention and MLP of a block."""
    gradient_bits: dict[str, list[int]] = field(default_factory=dict)
    """Bits of gradients that can be sent besides whole ones, by ZeRO stage."""
    model_parts: list[str] = field(default_factory=list)
    """Keys of unusual parts that its own models have."""
    offloads: list[str] = field(default_factory=list)
    """Kinds of state of which its files set one share in host memory."""
    switches: dict[str, list[Any]] = field(default_factory=dict)
    """Values of keys of `training` that its files can set; the first is what they set of a null."""
    releases: dict[str, str] = field(default_factory=dict)
    """The trainer's first release with a value of its switches, by value."""
    software: list[str] = field(default_factory=list)
    """Files of `conf/software/` that price its runs; the first stands for one that does not."""
    lacks: list[Lack] = field(default_factory=list)
    """Combinations of settings that the trainer does not run, each with its reason."""
    logs: list[TrainerLog] = field(default_factory=list)
    """Forms of its logs, which `tune --from-log` reads."""


@cache
def read_trainer(name: str) -> Trainer:
    """Return the trainer of a name of `EXPORTS`."""
    # as they lie in the package: OmegaConf takes 20 ms to check a file against `Trainer`
    given = read_yaml(group_file("trainer", name))["trainer"]
    given["lacks"] = [Lack(**lack) for lack in given.get("lacks", ())]
    given["logs"] = [TrainerLog(**log) for log in given.get("logs", ())]
    return Trainer(**given)


def read_yaml(path: Path) -> Any:
    """Return the content of a YAML file of the package; by libyaml, where PyYAML has it."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load(path.read_text(encoding="utf-8"), loader)  # type: ignore[no-untyped-call]


def module_data(module: str) -> Any:
    """Return the content of the YAML file that lies next to a module under its name.

    Args:
        module: `__file__` of the module.
    """
    return read_yaml(Path(module).with_suffix(".yaml"))


FACT_WORDS = module_data(__file__)
"""Words for facts of a job that are no keys of the configuration."""
