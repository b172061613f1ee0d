"""Schema of the whole configuration: the groups `space`, `cost`, `objective`, and the root."""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from darts_parallel import schedules
from darts_parallel.config.bilevel import BilevelConfig as BilevelConfig
from darts_parallel.config.checks import (
    MAX_SIZE,
    as_yaml,
    check_fields,
    one_of,
    ranged,
    require,
    require_at_most,
    require_member,
    require_members,
    require_printable_texts,
    require_within,
)
from darts_parallel.config.cluster import PRECISIONS as PRECISIONS
from darts_parallel.config.cluster import ClusterConfig as ClusterConfig
from darts_parallel.config.model import ModelConfig as ModelConfig
from darts_parallel.config.rules import check_rules
from darts_parallel.config.search import SearchConfig as SearchConfig
from darts_parallel.config.trainer import EXPORTS as EXPORTS
from darts_parallel.config.trainer import NONE, Trainer, read_trainer
from darts_parallel.config.trainer import config_dir as config_dir
from darts_parallel.config.training import RECOMPUTE_MODULES as RECOMPUTE_MODULES
from darts_parallel.config.training import TrainingConfig as TrainingConfig
from darts_parallel.config.words import EVERY_WORD
from darts_parallel.errors import Entries

TUNE: Entries = {
    "from": None,
    "top": 3,
    "measured": None,
    "log": None,
    "figures": "outputs/tuned",
    "force": False,
}
LARGEST_MARGIN = 0.9
"""Largest `space.memory_margin`: a device of which less may be used is another device."""


@dataclass
class CostConfig:
    """Which cost model scores the plans."""

    name: str = one_of("analytic", ("analytic", "profiled", "searcher"))
    """`analytic`: formulas; `profiled`: measured layer times; `searcher`: the closed-form 3D-parallel
    searcher."""
    profile: str | None = None
    """For `profiled`: a folder or a CSV file of measured layer times
    (`problem/measured_times.py`); null: none."""
    profile_model: str | None = None
    """The model as the profile spells it; null matches `model.name`."""
    profile_gpu: str | None = None
    """The GPU as the profile spells it; null matches the names of the cluster's devices."""
    profile_collectives: str | None = one_of(None, ("included", "excluded", None))
    """Whether the measured times at tp above 1 include the collectives of tensor parallelism, which
    then are not added; null: the column `collectives` of the profile says it, or only tp 1 was
    measured."""
    pipeline: str = one_of("closed_form", ("closed_form", "simulated"))
    """How a pipeline is priced. `closed_form`: by the formula of 1F1B; interleaved stages are
    simulated, since unequal chunks wait for each other. `simulated`: by the longest path through
    the schedule. That is slower, and exact where stages are uneven. Gradient synchronisation then
    starts when the stage's last backward ends."""
    schedule: str = "1f1b"
    """`1f1b`; with `pipeline=simulated` also `gpipe` (all micro-batches in flight) and
    `zero_bubble` (ZB-H1; pp of them). Plans with virtual stages are interleaved. This key counts
    only if `space.schedules` is null."""
    p2p: str = one_of("blocking", ("blocking", "overlapped"))
    """Messages between stages. `blocking`: the later stage waits for its message. `overlapped`: messages
    run next to compute, if the pipeline is simulated."""
    lossy_block: int = one_of(64, (16, 32, 64, 128, 256))
    """Numbers that share one scale of 16 bits where a collective sends few bits."""
    term: Any = None
    """A cost term of your own, `package.file:function`, or a list of them (`docs/how-to/own-term.md`);
    null: none. The search runs the code of the file."""

    @property
    def analytic(self) -> bool:
        """Whether seconds and bytes follow from formulas."""
        return self.name == "analytic"

    @property
    def knows_stages(self) -> bool:
        """Whether it prices stages; the closed-form 3D-parallel searcher does not."""
        return self.name != "searcher"

    def __post_init__(self) -> None:
        check_fields("cost", self)
        self.term = [self.term] if isinstance(self.term, str) else self.term
        if self.term is not None:
            given = f"cost.term={self.term}"
            named = all(isinstance(path, str) for path in self.term)
            require(named, given, "name functions", "cost.term=package.file:function")
        require_member("cost.schedule", self.schedule, schedules.names_with_chunks(1))
        self.schedule = schedules.full_name(self.schedule)
        check_rules("cost", self)


@dataclass
class ObjectiveConfig:
    """Quantity that is minimised, and its limit."""

    name: str = one_of(
        "time", ("time", "goodput", "cost", "time_under_budget", "cost_under_deadline")
    )
    """Choose what is minimised. `time`: seconds of a step. `goodput`: seconds of a useful step where
    GPUs fail. `cost`: dollars. `time_under_budget`: seconds under a budget. `cost_under_deadline`:
    dollars before a deadline."""
    num_iterations: float | None = ranged(None, 1e-6, 1e15)
    """Optimizer steps of the job; dollars need them. null: unknown, which `objective=time` allows."""
    budget_usd: float | None = ranged(None, 1e-6, 1e15)
    """Dollars that the whole job may cost; null: no limit."""
    deadline_hours: float | None = ranged(None, 1e-6, 1e15)
    """Hours that the whole job may take; null: no limit."""
    choose_nodes: bool = False
    """The node groups are an offer: rent as many nodes of each as the objective wants;
    with `goodput` the others are spares."""

    @property
    def in_dollars(self) -> bool:
        """Whether it needs prices and the length of the job."""
        return self.name not in ("time", "goodput")

    def __post_init__(self) -> None:
        check_fields("objective", self)
        check_rules("objective", self)


RECOMPUTE = ("none", "selective", "full")
LOSSLESS = 16
"""Bits per number of a collective that sends the numbers as they are."""
COMM_BITS = (LOSSLESS, 8, 4, 2)
PIPELINES_OUTSIDE = "tp-dp-pp"
PIPELINES_INSIDE = "tp-pp-dp"
AXIS_ORDERS = (PIPELINES_OUTSIDE, PIPELINES_INSIDE)
"""Orders in which ranks count the degrees, the fastest first (cp counts with tp)."""
SPACES = ("uniform", "stagewise", "layerwise")
"""In order of growth: one strategy for all layers, one per stage, one per layer."""
CUTS = (LAYER, HALF_BLOCK) = ("layer", "half_block")
OFFLOADS = ("activation", "optimizer")
WHOLE = (
    "pp",
    "num_micro_batches",
    "micro_batch_size",
    "dp",
    "tp",
    "zero_stage",
    "tp_comm_bits",
    "grad_comm_bits",
    "shard_size",
    "virtual_stages",
    "cp",
    "ep",
    "etp",
)
"""Keys of the space that hold whole numbers."""
Share = tuple[float, float]
"""Shares of each of `OFFLOADS` that a device keeps in host memory."""
Shares = tuple[Share, ...]
"""Shares of every device; empty: no device keeps anything there."""


@dataclass
class SpaceConfig:
    """Choices of the search; null leaves a choice free, a value or list pins it."""

    kind: str = one_of("layerwise", SPACES)
    """`uniform`: one strategy for all layers; `stagewise`: one for each pipeline stage; `layerwise`:
    one for each layer."""
    pp: Any = ranged(None)
    """Pipeline-parallel degree; null: every one that divides the GPUs."""
    num_micro_batches: Any = ranged(None)
    """Micro-batches of one step on every data-parallel rank; null: every number that divides the
    batch."""
    micro_batch_size: Any = ranged(None)
    """Sequences of one micro-batch; null: every size that divides the batch of a rank."""
    dp: Any = ranged(None)
    """Data-parallel degree; null: every one that fits the stage."""
    tp: Any = ranged(None)
    """Tensor-parallel degree, a divisor of the heads and the key-value heads (Megatron-LM also takes
    a multiple of these) that divides the GPUs of a node or fills whole nodes; null: every one up to
    max(8, GPUs of a node)."""
    zero_stage: Any = one_of(None, (0, 1, 2, 3))
    """ZeRO stage: 0 shards nothing, 1 optimizer states, 2 gradients too, 3 weights too (FSDP); null:
    all four."""
    recompute: Any = one_of(None, RECOMPUTE)
    """Activations that backward computes again: `none`, `selective` (`training.recompute_modules`) or
    `full`; null: all three."""
    sequence_parallel: Any = one_of(None, (False, True))
    """Norms and dropout are split over the tensor-parallel ranks, by tokens; null: both true and
    false."""
    tp_comm_bits: Any = one_of(LOSSLESS, COMM_BITS)
    """Bits per number of tensor-parallel collectives; lossy ones only where the user lists them."""
    grad_comm_bits: Any = one_of(LOSSLESS, COMM_BITS)
    """Bits per number of gradient synchronisation."""
    shard_size: Any = ranged(0, 0)
    """Data-parallel ranks that ZeRO states are sharded over; 0: all of them."""
    virtual_stages: Any = ranged(1)
    """Stages of a device (interleaved schedule); null: every number that divides the blocks
    evenly."""
    schedules: Any = one_of(None, (*schedules.NAMES, schedules.SEARCHED))
    """Pipeline schedules to choose from. All of them are simulated. null:
    `cost.schedule`, and `interleaved` where `virtual_stages` is above 1. If the list has
    `interleaved` and `virtual_stages` is 1, then 2 virtual stages are tried, and every number
    that divides the blocks. `searched`: any order of passes, found along critical paths."""
    cut: str = one_of(LAYER, CUTS)
    """Where stages may begin: at any layer, or also between attention and MLP of a block, which
    then are layers of their own."""
    cp: Any = ranged(1)
    """Context-parallel degree; null: every one that divides half of the sequence, since each rank gets
    two chunks of equal work."""
    ep: Any = ranged(None)
    """Expert-parallel degree of layers with experts; null: every one that divides them and the
    stage."""
    etp: Any = ranged(1)
    """Expert tensor-parallel degree; null: every one that a node and the experts' width allow."""
    offload: Any = one_of(None, OFFLOADS)
    """Kinds of state of which a share may lie in host memory; null: nothing. The shares are
    continuous, one of each kind a device of the pipeline. A mapping such as `{optimizer: 1.0}` gives
    the shares of all devices."""
    node_orders: str = one_of("auto", ("auto", "all", "shifts", "adjacent", "given"))
    """Orders of unequal nodes along the pipeline. `adjacent`: equal nodes side by side; `shifts`:
    also rotated; `all`: every order; `given`: the order of the file; `auto`: `all` if there are
    few, else `shifts`."""
    axis_order: Any = one_of(None, AXIS_ORDERS)
    """Order in which ranks count the degrees. `tp-dp-pp`: a stage has whole nodes where it is large
    enough. `tp-pp-dp`: every node holds all stages, and messages between them stay inside it;
    replicas lie on different nodes (Megatron-LM's `--use-tp-pp-dp-mapping`). It needs equal nodes whose
    GPUs tp · cp · pp divides, and no experts. null: both, where the trainer has them."""
    memory_margin: float = ranged(0.0, 0.0, LARGEST_MARGIN)
    """Share of every device's memory that plans leave free, next to what the software keeps
    back. The chance to fit counts it as used."""
    out_of_memory: float = ranged(0.2, 1e-4, 0.5)
    """Highest chance with which the whole job may run out of memory, by the memory model's own
    errors. 0.5: a plan fits if the predicted peak of every device does, without any headroom."""
    executable: bool = False
    """Only what `darts_parallel.run` executes."""
    trainer: str | None = one_of(None, EXPORTS)
    """Only plans that this trainer runs. Trainers without layer-wise plans, all
    except `torch` and `galvatron`, make the space `uniform`. The group `trainer` sets it. null:
    plans for any trainer."""

    def __post_init__(self) -> None:
        for entry in fields(self):
            whole = getattr(self, entry.name)
            if isinstance(whole, dict) and entry.name != "offload":
                rule = "be null, a value or a list of values, not a mapping"
                require(False, f"space.{entry.name}={whole}", rule, "null")
            for value in self.pinned(entry.name) or ():
                if entry.name in WHOLE:
                    self._require_whole(entry.name, value)
                elif entry.name == "sequence_parallel":
                    switch = isinstance(value, bool)
                    require(switch, f"space.sequence_parallel={value}", "be true or false", "true")
        if self.schedules is not None:
            named = map(schedules.full_name, self.pinned("schedules") or ())
            self.schedules = list(dict.fromkeys(named))
        check_fields("space", self)
        self._settle_kind()
        self._settle_offload()

    def _settle_kind(self) -> None:
        """Set what an executable space, and one of a trainer, are without being asked for."""
        if self.trainer is not None:
            if read_trainer(self.trainer).executable:
                self.executable, self.cp = True, self.cp or 1
            elif not read_trainer(self.trainer).layerwise:
                self.kind = "uniform"  # one strategy for all layers is what the others run
        if self.executable or not (
            self.trainer is None or read_trainer(self.trainer).inside_pipelines
        ):
            orders = self.pinned("axis_order") or (PIPELINES_OUTSIDE,)
            trainer = self.trainer or "torch"
            rule = f"be {PIPELINES_OUTSIDE} with trainer={trainer}, whose ranks count pp last"
            given = f"space.axis_order={as_yaml(self.axis_order)}"
            require(orders == (PIPELINES_OUTSIDE,), given, rule, PIPELINES_OUTSIDE)
            self.axis_order = PIPELINES_OUTSIDE
        if self.executable:
            self.node_orders = "given"  # ranks are numbered by whoever starts the processes
        check_rules("space", self)

    def _settle_offload(self) -> None:
        """Give kinds of offloaded state one order, and refuse shares that the trainer cannot set."""
        kinds = self.pinned("offload")
        if kinds is None:
            return
        for kind, share in zip(OFFLOADS, self.shares or (), strict=False):
            legal = type(share) in (int, float) and 0 <= share <= 1
            require(legal, f"space.offload.{kind}={share}", "be a number from 0 to 1", "1.0")
        shown = f"space.offload={self.offload}".replace("'", "")
        if self.shares is None:
            self.offload = sorted(set(kinds), key=OFFLOADS.index)
        if self.trainer is None and not self.executable:
            return
        settable = read_trainer(self.trainer or "torch").offloads
        near = f"{{{settable[0]}: 1.0}}" if settable else "null"
        owner = f"space.trainer={self.trainer}" if self.trainer else "space.executable=true"
        rule = f"be null with {owner}, or shares that its files set"
        require(self.shares is not None and set(kinds) <= set(settable), shown, rule, near)

    @property
    def pins(self) -> list[str]:
        """Values other than the default of keys that have a short word, e.g. `tp=2`."""
        usual = SpaceConfig()
        words = {key: word for word, key in EVERY_WORD.items()}
        found = []
        for entry in fields(self):
            word = words.get(f"space.{entry.name}")
            value = getattr(self, entry.name)
            if word and value not in (None, getattr(usual, entry.name)):
                found.append(f"{word}={as_yaml(value)}")
        return found

    @property
    def shares(self) -> Share | None:
        """Shares in host memory that the user gives, of all `OFFLOADS`; None: they are searched."""
        if not isinstance(self.offload, dict):
            return None
        activation, optimizer = (self.offload.get(kind, 0.0) for kind in OFFLOADS)
        return activation, optimizer

    def pinned(self, key: str) -> tuple[Any, ...] | None:
        """Return the values that the user allows for `key`, or None where all are."""
        value = getattr(self, key)
        if value is None:
            return None
        values = tuple(value) if isinstance(value, (list, tuple, dict)) else (value,)
        require(
            bool(values), f"space.{key}=[]", "list at least one value", "null, which leaves it free"
        )
        return values

    def only(self, key: str, values: Iterable[Any]) -> list[Any]:
        """Return the values that the user allows for `key`."""
        pinned = self.pinned(key)
        return [value for value in values if pinned is None or value in pinned]

    def _require_whole(self, key: str, value: Any) -> None:
        if type(value) is not int:
            number = isinstance(value, float) and abs(value) < MAX_SIZE
            near = max(round(value), 1) if number else "null, which leaves it free"
            require(False, f"space.{key}={value}", "be a whole number or a list of them", near)


@dataclass
class VerificationConfig:
    """The exact baselines that check the plan."""

    enabled: bool = True
    """Check the plan by the exact methods."""
    max_seconds: float = ranged(60.0, 0.0, 1e8)
    """An exact method that needs longer stops, and the report gives the bound that it reached."""

    def __post_init__(self) -> None:
        check_fields("verification", self)


@dataclass
class OutputConfig:
    """Files that the command leaves in the run directory besides `plan.json`."""

    tensorboard: bool = True
    """Write event files for TensorBoard into the folder `tensorboard` of the run."""
    progress: bool = True
    """Show a progress bar in a terminal."""
    verbose: bool = False
    """Print all tables of the report."""


@dataclass
class Config:
    """The whole configuration of one run."""

    model: ModelConfig = MISSING
    """The Transformer to train."""
    cluster: ClusterConfig = MISSING
    """The machine: nodes, GPUs and links."""
    training: TrainingConfig = MISSING
    """The job: batch, sequence length, precision, optimizer."""
    space: SpaceConfig = MISSING
    """The plans that the search may choose from."""
    search: SearchConfig = MISSING
    """The search method and its settings."""
    trainer: Trainer = field(default_factory=Trainer)
    """Who runs the plan: sets `space.trainer`, `training.software` and `export`."""
    cost: CostConfig = MISSING
    """The cost model that prices plans."""
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    """The quantity that the search minimises."""
    verification: VerificationConfig = field(default_factory=VerificationConfig)
    """The exact methods that check the plan."""
    output: OutputConfig = field(default_factory=OutputConfig)
    """Files that are written next to `plan.json`."""
    own_software: Entries = field(default_factory=dict)
    """Figures of `training.software` where that is a file of `--config-dir`; the command sets it."""
    bilevel: BilevelConfig | None = None
    """Settings of the bilevel search; null: the plain search."""
    plan: str | None = None
    """A plan.json to evaluate instead of searching. It is priced on the problem that it was made
    for; keys of the command change this problem. null: search."""
    tune: Entries = field(default_factory=TUNE.copy)
    """Inputs of `tune`. `from` is the plan.json whose job is tuned. `top` is the number of plans to
    propose. `measured` holds the trials so far: a list of {plan, seconds or oom, memory_gb}, or a CSV
    file with these columns. `log` is the file that a trainer printed when it ran that plan. `figures`
    is the folder for `--config-dir` that keeps what logs say of the cluster. `force` lets a log move
    figures even if it is too far off to be believed."""
    export: str | None = None
    """A trainer in whose words the plan is written, too; null: for none."""
    explain: bool = False
    """Print where every byte and second of the plan comes from (also `--explain`)."""
    price: bool = False
    """Print what fills the memory, and how far the plan is from the best of its space (the verb
    `price`)."""

    def __post_init__(self) -> None:
        for part in fields(self):  # behind an interpolation OmegaConf lets a text pass
            value = getattr(self, part.name)
            mapping = is_dataclass(part.type)
            valid = not (mapping and isinstance(value, str))
            require(valid, f"{part.name}={value}", "be a mapping", f"{part.name}.KEY=VALUE")
        require_printable_texts("", self)
        require_member("trainer.name", self.trainer.name, (NONE, *EXPORTS))
        require_members("tune key", self.tune, tuple(TUNE))
        require_within("tune.top", self.tune.get("top", 3), 1, MAX_SIZE)
        if self.export is not None:
            require_member("export", self.export, EXPORTS)
        check_rules("job", self)
        if self.space.schedules is not None:
            # schedules are compared by one reading; most have no closed form
            self.cost.pipeline = "simulated"
            self.cost.schedule = "1f1b"
        if self.space.offload is not None:
            self.cluster.require_host_links()
        self._check_together()

    def abilities(self, name: str) -> Trainer:
        """Return what a trainer of `EXPORTS` can run, by the group where that is its."""
        return self.trainer if self.trainer.name == name else read_trainer(name)

    @property
    def rules(self) -> Trainer:
        """Abilities of the trainer of the space; without one, those of `trainer=none`."""
        name = self.space.trainer
        return Trainer() if name is None else self.abilities(name)

    def with_space(self, **values: Any) -> "Config":
        """Return the configuration with other keys of the space.

        Errors:
            ConfigError: another rule forbids the change.
        """
        return replace(self, space=replace(self.space, **values))

    def for_trainer(self, name: str, **space: Any) -> "Config":
        """Return the configuration of a trainer with its own efficiencies, and other keys of the space.

        Errors:
            ConfigError: the trainer forbids a key.
        """
        known = self.abilities(name).software
        software = self.training.software
        if software not in known:
            software = known[0] if known else None
        training = replace(self.training, software=software)
        return replace(self, training=training).with_space(trainer=name, **space)

    def job(self, target: str | None) -> TrainingConfig:
        """Return the job with switches that are null as a trainer's files set them."""
        training = self.training
        switches = read_trainer(target).switches if target is not None else {}
        given = {
            key: values[0] for key, values in switches.items() if getattr(training, key) is None
        }
        return replace(training, **given)

    @property
    def solved(self) -> bool:
        """Whether exact methods price plans: in closed form, without shares in host memory or own terms."""
        closed = self.cost.pipeline == "closed_form"
        return closed and self.space.offload is None and self.cost.term is None

    def _check_together(self) -> None:
        require_at_most("training.lora_rank", self.training.lora_rank, self.model.hidden_size)
        if self.space.trainer and self.model.num_experts:
            layerwise = self.abilities(self.space.trainer).executable
            self.space.kind = (
                self.space.kind if layerwise else "uniform"
            )  # its mixtures have one strategy
        longest = self.model.max_seq_len
        length = self.training.seq_len
        rule = f"be at most model.max_seq_len={longest}"
        near = f"{longest}, or model.max_seq_len={length} for a model with longer positions"
        require(length <= longest, f"training.seq_len={length}", rule, near)
        for name in self.cluster.used_devices:
            peaks = self.cluster.devices[name].peak_TFLOPs
            near = next((p for p in PRECISIONS if p in peaks), "none")
            rule = f"be one of {', '.join(peaks)}, which cluster.devices.{name}.peak_TFLOPs lists"
            given = self.training.precision
            require(given in peaks, f"training.precision={given}", rule, near)


@cache
def register_schema() -> None:
    """Give Hydra the schema that `conf/config.yaml` and its groups are checked against."""
    ConfigStore.instance().store(name="schema", node=Config)
