"""The problem: model x cluster x training job x space x cost model, frozen."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from darts_parallel.config import (
    HALF_BLOCK,
    Config,
    TrainingConfig,
    as_yaml,
    load_config,
    require,
)
from darts_parallel.errors import ConfigError
from darts_parallel.problem.cluster import Cluster, Device
from darts_parallel.problem.layer_sources import captured_block
from darts_parallel.problem.layer_spec import LayerSpec
from darts_parallel.problem.measured_times import MeasuredTimes, read_measured
from darts_parallel.problem.model import Model
from darts_parallel.problem.referee import check_import
from darts_parallel.problem.software import COMMON, Software, read_software


@dataclass(frozen=True)
class Problem:
    """The job for which a plan is searched; all but `config` is derived from it."""

    config: Config
    model: Model
    cluster: Cluster
    training: TrainingConfig
    measured: MeasuredTimes | None = None
    """Layer times that take the place of the analytic ones (`cost=profiled`)."""
    software: Software = COMMON
    """Behaviour and efficiencies of the framework (`training.software`)."""
    headroom: float = 0.0
    """Share of what `space.memory_margin` leaves that plans leave free for errors of the memory
    model."""

    @staticmethod
    def from_config(config: Config, known: Model | None = None) -> "Problem":
        """Derive the domain objects (SI units) from the checked configuration.

        Args:
            known: A model that serves again where it is the same, with all that it derived.
        """
        training = config.job(config.space.trainer)
        software = read_software(training.software, config.own_software).under(training)
        cluster = Cluster.from_config(config.cluster, config.training.precision, software)
        measured = _measured(config) if config.cost.name == "profiled" else None
        block, measured = captured_block(config, cluster) or (None, measured)
        model = _model(config, block)
        if known == model:
            model = known
        targets = config.training.lora_targets
        wanted = f"training.lora_targets={as_yaml(list(targets))}"
        rule = "name a product outside of routed experts"
        require(model.num_trained_parameters > 0, wanted, rule, "[linear_qkv]")
        return Problem(config, model, cluster, training, measured, software)

    @cached_property
    def priced(self) -> dict[Any, Any]:
        """Prices of plans by `hard_plan`, remembered."""
        return {}

    @cached_property
    def tables(self) -> list[Any]:
        """Cost tables of its space, as far as they are built: `hard_plan` reads plans from them."""
        return []

    @cached_property
    def doubled(self) -> dict[str, "Problem"]:
        """The problem with twice a factor of the devices' bytes, by factor, as far as it was asked."""
        return {}

    def leaving_free(self, headroom: float) -> "Problem":
        """Return the problem with another `headroom`; it knows the same tables and doubled problems."""
        other = replace(self, headroom=headroom)
        other.tables.extend(self.tables)
        vars(other)["doubled"] = self.doubled
        return other

    def with_config(self, **parts: Any) -> "Problem":
        """Return the problem with other parts of its configuration, and as much memory left free.

        Errors:
            ConfigError: another rule forbids the change.
        """
        changed = Problem.from_config(replace(self.config, **parts), self.model)
        return replace(changed, headroom=self.headroom)

    def with_training(self, **values: Any) -> "Problem":
        """Return the problem with other values of `training`, as `with_config`."""
        return self.with_config(training=replace(self.training, **values))

    @property
    def usable(self) -> float:
        """Share of every device's memory that `space.memory_margin` leaves."""
        return 1.0 - self.config.space.memory_margin

    @property
    def margin(self) -> float:
        """Share of every device's memory that plans leave free."""
        return 1.0 - self.usable * (1.0 - self.headroom)

    @property
    def num_layers(self) -> int:
        """Layers of the chain: embedding, blocks, head and loss."""
        return len(self.model.layers)

    @property
    def tokens_per_iteration(self) -> int:
        """Tokens of one optimizer step."""
        return self.training.global_batch_size * self.training.seq_len

    @property
    def unmeasured(self) -> list[str]:
        """Kinds of layers that `cost.profile` has no times of."""
        if self.measured is None or self.config.cost.profile is None:
            return []
        times = self.measured.by_device.values()
        known = {kind for entries in times for kind, _ in entries}
        kinds = dict.fromkeys(layer.kind for layer in self.model.layers)
        return [kind for kind in kinds if kind not in known]

    def with_devices(self, change: Callable[[Device], Device]) -> "Problem":
        """Return the problem with changed devices in all node groups."""
        return replace(self, cluster=self.cluster.with_devices(change))


def _model(config: Config, block: LayerSpec | None) -> Model:
    """Build the chain; some trainers keep embedding and head on the stage of a block."""
    training = config.training
    hybrid = config.model.hybrid_override_pattern is not None
    ends = config.rules.whole_ends
    halves = config.space.cut == HALF_BLOCK
    rank = training.lora_rank
    joined = ends == "always" or ((hybrid or halves) and ends == "hybrids")
    targets = tuple(training.lora_targets)
    copies = config.rules.replicated_key_values
    return Model(
        config.model, training.fused_attention, joined, rank, targets, block, halves, copies
    )


def _measured(config: Config) -> MeasuredTimes:
    devices = tuple(dict.fromkeys(group.device for group in config.cluster.nodes))
    return read_measured(config.cost, config.model.name, config.training.seq_len, devices)


def load_problem(overrides: list[str] | None = None, config_dir: str | None = None) -> Problem:
    """Compose a problem as the command does.

    Args:
        overrides: Hydra overrides, e.g. `["model=gpt2_xl", "space.pp=8"]`.
        config_dir: Folder with further configuration files of the user, as `--config-dir`.

    Errors:
        ConfigError: the overrides or the files break a rule.
    """
    if isinstance(overrides, str):
        raise ConfigError(f"overrides={overrides!r} must be a list; try {overrides.split()}.")
    texts = all(isinstance(one, str) for one in overrides or ())
    require(texts, f"overrides={overrides!r}", "be a list of texts", '["model=llama3_8b", "tp=2"]')
    config = load_config(overrides, config_dir, check_import)
    rule = "be read by Plan.from_dict, since its job is not read here"
    require(config.plan is None, f"plan={config.plan}", rule, "the words of its job")
    return Problem.from_config(config)
