"""Share between targets: the plan in their terms, and how they refuse what they cannot express."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import pairwise, product
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from darts_parallel.config import (
    LOSSLESS,
    OFFLOADS,
    PIPELINES_INSIDE,
    PIPELINES_OUTSIDE,
    ModelConfig,
    Trainer,
    TrainingConfig,
    as_yaml,
    matches,
    quoted,
    read_trainer,
    read_yaml,
)
from darts_parallel.errors import DartsParallelError, Entries, UnsupportedError
from darts_parallel.plans import (
    BatchPhase,
    LayerStrategy,
    Plan,
    facts,
    job_facts,
    trainer_schedules,
)
from darts_parallel.problem import LayerSpec, Problem
from darts_parallel.schedules import SEARCHED, find

BLOCKS = (
    "block",
    "encoder",
    "decoder",
    "sliding_block",
    "mamba",
    "attention",
    "sliding_attention",
    "mlp",
    "experts",
    "sliding_experts",
    "module",
)
"""Kinds of layer that trainers count as layers."""
SHARED = (
    "tp",
    "dp",
    "sequence_parallel",
    "zero_stage",
    "shard_size",
    "tp_comm_bits",
    "grad_comm_bits",
)
"""Fields of a strategy that most trainers have once; a layer without parameters has the first
three."""
WORDS = {"activation": "activations", "optimizer": "optimizer state"}
"""Kinds of state that may be offloaded, in a sentence."""


SWITCHES = (
    "attention_kernel",
    "tp_comm_overlap",
    "compiled",
    "loss",
    "cuda_graphs",
    "optimizer",
    "fp8_dot_product_attention",
    "overlap_moe_expert_parallel_comm",
    "moe_shared_expert_overlap",
    "moe_token_dispatcher_type",
)
"""Keys of `training` that a trainer turns on or off, or refuses (`Trainer.switches`)."""


INSTALLED = {"fa2": "flash_attn", "fa3": "flash_attn_interface"}
"""Python packages of attention kernels that only the installation has or lacks."""
Flag = tuple[str, str | int | float | None]
"""A flag of a command and its value; None: it has none."""
Flags = list[Flag]


Refusals = list[tuple[str, str]]
"""Settings that a target cannot express, and the way out of each."""
Price = Callable[[Plan], float]
"""Seconds per iteration of a plan, infinite where it does not fit."""


@cache
def read_words() -> Entries:
    """Read `words.yaml`: words by trainer and key."""
    return read_yaml(Path(__file__).with_name("words.yaml"))


def written(table: dict[str, Entries], known: Entries) -> Flags:
    """Return the flags of a table whose conditions hold.

    Args:
        table: Flags as a command line has them, with settings in braces, and their conditions (`matches`).
        known: The settings.
    """
    found: Flags = []
    for text, when in table.items():
        if all(matches(known[key], wanted) for key, wanted in when.items()):
            found += read_flags(text.format(**known))
    return found


def read_flags(text: str) -> Flags:
    """Read flags as a command line writes them."""
    found: Flags = []
    for flag in text.split("--")[1:]:
        name, _, value = flag.strip().partition(" ")
        found.append((name, value or None))
    return found


def yaml_word(value: Any) -> str:
    """Write a name, a number or a flag as YAML does."""
    text = yaml.safe_dump(value, width=inf)
    return text.partition("\n")[0]


@dataclass(frozen=True)
class Exported:
    """Files of a target: names and texts, the main one first, and what else a user must know."""

    files: dict[str, str]
    notes: tuple[str, ...] = ()
    follows_phases: bool = False
    """Whether the files change the global batch size as the phases of the training do."""


class Compared(NamedTuple):
    """A layer, and the fields of its strategy in which it must not differ from others."""

    name: str
    strategy: LayerStrategy
    fields: Sequence[str]


@dataclass(frozen=True)
class ChunkContent:
    """Layers of a pipeline stage, or of one of its virtual stages."""

    embedding: bool
    first_block: int
    num_blocks: int
    head: bool
    mtp: int = 0
    """Modules of multi-token prediction."""


@dataclass(frozen=True)
class Request:
    """A plan and its problem, as a target asks for them."""

    target: str
    problem: Problem
    plan: Plan
    refusals: Refusals = field(default_factory=list)
    """Settings that the target cannot express so far, and the way out of each (`refuse`)."""
    price: Price | None = None
    """None: not known."""
    phases: Sequence[BatchPhase] = ()
    """Global batch sizes and plans of the training, by step; the plan is that of the last."""
    key: str = "export"
    """Key of the configuration that names the target, for refusals."""
    writes: bool = True
    """Whether files are wanted, or only refusals."""

    @property
    def trainer(self) -> Trainer:
        """Abilities of the target."""
        return self.problem.config.abilities(self.target)

    @cached_property
    def training(self) -> TrainingConfig:
        """The job, with switches that are null as the target's files set them."""
        return self.problem.config.job(self.target)

    def words(self, key: str) -> dict[Any, str]:
        """Return the trainer's words by value of a key of `training`."""
        return read_words()[self.target][key]

    def word(self, key: str) -> str:
        """Return the trainer's word for the job's value of a key; it is empty where there is none."""
        return self.words(key).get(getattr(self.training, key), "")

    @property
    def model(self) -> ModelConfig:
        """Sizes of the model."""
        return self.problem.config.model

    @property
    def half_blocks(self) -> bool:
        """Whether attention and MLP of a block are layers of their own."""
        return self.problem.model.half_blocks

    @cached_property
    def chunks(self) -> tuple[ChunkContent, ...]:
        """Contents of every chunk in order of layers; chunk c runs on stage `c % pp`."""
        kinds = [layer.kind for layer in self.problem.model.layers]
        chunks = []
        block = 0
        for first, end in pairwise(self.plan.boundaries):
            inside = kinds[first:end]
            count = sum(kind in BLOCKS for kind in inside)
            mtp = sum(kind.startswith("mtp") for kind in inside)
            embedding = "embedding" in inside
            chunks.append(ChunkContent(embedding, block, count, "head" in inside, mtp))
            block += count
        return tuple(chunks)

    @property
    def even(self) -> bool:
        """Whether all chunks hold as many blocks (and none only the embedding or the head).

        Prediction modules stand with the head.
        """
        chunks = self.chunks
        counts = {chunk.num_blocks for chunk in chunks}
        with_head = all(chunk.head or not chunk.mtp for chunk in chunks)
        return counts == {chunks[0].num_blocks} and 0 not in counts and with_head

    @property
    def pairs(self) -> list[tuple[LayerSpec, LayerStrategy]]:
        """Every layer with its strategy."""
        return list(zip(self.problem.model.layers, self.plan.layers, strict=True))

    @cached_property
    def blocks(self) -> list[LayerStrategy]:
        """Strategy of every block."""
        return [strategy for layer, strategy in self.pairs if layer.kind in BLOCKS]

    def blocks_of(self, chunk: ChunkContent) -> list[LayerStrategy]:
        """Return the strategies of the blocks of a chunk."""
        return self.blocks[chunk.first_block : chunk.first_block + chunk.num_blocks]

    @cached_property
    def _job_facts(self) -> Entries:
        problem = self.problem
        offloaded = self.plan.offloaded_optimizer
        return job_facts(problem.model, self.training, problem.software, offloaded)

    def facts(self, strategy: LayerStrategy) -> Entries:
        """Return the settings of a strategy that the rules of `conf/trainer/` may name."""
        plan = self.plan
        return facts(self._job_facts, plan.pp, plan.cp, plan.schedule_name, strategy)

    def micro_batch_size(self, strategy: LayerStrategy) -> int:
        """Return the sequences of a micro-batch on one data-parallel rank."""
        batch = self.training.global_batch_size
        return batch // (strategy.dp * self.plan.num_micro_batches)

    @property
    def nodes(self) -> tuple[int, int | None]:
        """Number of nodes, and GPUs of a node; None where nodes differ."""
        cluster = self.problem.cluster
        sizes = {group.gpus for group in cluster.groups}
        gpus = sizes.pop() if len(sizes) == 1 else None
        return len(cluster.node_types), gpus

    def sharded_over(self, strategy: LayerStrategy) -> int:
        """Return the ranks that share the state of a replica; 1 without ZeRO."""
        if not strategy.zero_stage:
            return 1
        return strategy.shard_ranks(self.plan.cp)

    def shard_degrees(self, strategy: LayerStrategy) -> tuple[int, int]:
        """Return the replicas and shards of a mesh that shards over `shards * cp` ranks.

        Errors: UnsupportedError: a sharding group is no multiple of the context-parallel group (at
            `settle`).
        """
        if strategy.zero_stage == 0:
            return strategy.dp, 1
        sharded = self.sharded_over(strategy)
        cp = self.plan.cp
        if sharded % cp:
            self.refuse(
                f"shard_size={sharded} with cp={cp}, and its sharding groups hold whole cp groups",
                "space.shard_size=0",
            )
            return 1, strategy.dp
        return strategy.dp * cp // sharded, sharded // cp

    def headline(self) -> str:
        """Return two lines of comment for a file, each behind `#`: which job, which plan.

        Never the first two lines of a Python file, where a comment can name another encoding (PEP
        263), and never inside a string that a name could close.
        """
        cluster = self.problem.cluster
        job = f"{quoted(self.model.name)} on {quoted(cluster.name)}, {cluster.num_devices} GPUs"
        plan = self.plan.describe(self.training.global_batch_size)
        return f"# {job}; written by darts-parallel\n# {plan}"

    def refuse(self, what: str, space: str = "space=uniform") -> UnsupportedError:
        """Note a setting that the target cannot express; `settle` raises all in one sentence.

        Whoever cannot go on without it raises what this returns.

        Args:
            what: What the plan (or the model) has and the target lacks, in one clause.
            space: Overrides of the closest space whose plans it can express, or another way out.
        """
        if (what, space) not in self.refusals:
            self.refusals.append((what, space))
        return self._refused()

    def settle(self) -> None:
        """End a target's checks.

        Errors:
            UnsupportedError: all that was refused, and the closest space (or model) that is not.
        """
        self._require_no_offload()
        training = self.training
        if training.lora_rank and self.trainer.own_model:
            self.refuse(
                f"training.lora_rank={training.lora_rank}, and the written program trains all weights",
                "training.lora_rank=0",
            )
        self._require_switches()
        if self.refusals:
            raise self._refused()

    def _require_switches(self) -> None:
        """Refuse switches of the job that no file of the target sets."""
        for key in SWITCHES:
            value = getattr(self.training, key)
            known = self.trainer.switches.get(key, [getattr(TrainingConfig, key)])
            if value not in known:
                self.refuse(
                    f"training.{key}={as_yaml(value)}, and no written file sets it",
                    f"training.{key}={as_yaml(known[0])}",
                )

    def _require_no_offload(self) -> None:
        settable = read_trainer(self.target).offloads
        for number, kind in enumerate(OFFLOADS):
            own = {shares[number] for shares in self.plan.offload}
            most = max(own, default=0.0)
            if most > 0 and (len(own) > 1 or kind not in settable):
                self.refuse(
                    f"up to {most:.3g} of a stage's {WORDS[kind]} lie in host memory, and this trainer "
                    "has no setting for stage by stage",
                    "space.offload=null",
                )

    def _refused(self) -> UnsupportedError:
        ways = [way.replace("export=", f"{self.key}=") for _, way in self.refusals]
        others = list(dict.fromkeys(way for way in ways if not way.startswith("space")))
        spaces = _joined([way for way in ways if way.startswith("space")])
        near = [f"try {' and '.join(others)}"] if others else []
        near += [f"closest space to search in: {spaces}"] if spaces else []
        what = "; and ".join(what for what, _ in self.refusals)
        return UnsupportedError(f"{self.key}={self.target}: {what}; {'; '.join(near)}.")

    def shared(self, layers: Sequence[Compared], why: str) -> LayerStrategy:
        """Return the strategy of the first layer; refuse the first difference of another.

        Args:
            why: What the target has for all of them alike, in one clause.
        """
        first, *others = layers
        for own in others:
            for key in own.fields:
                mine = getattr(own.strategy, key)
                its = getattr(first.strategy, key)
                if mine != its:
                    self.refuse(
                        f"{own.name} has {key}={mine} and {first.name} has {key}={its}, but {why}"
                    )
                    return first.strategy
        return first.strategy

    def uniform(self) -> LayerStrategy:
        """Return the one strategy of all layers, recomputation apart (see `recompute`).

        A layer without parameters (the loss) may name any ZeRO stage.
        """
        rows = []
        for layer, own in self.pairs:
            trained = layer.parameters(self.model.vocab_size) > 0
            rows.append(Compared(layer.name, own, SHARED if trained else SHARED[:3]))
        return self.shared(rows, "all layers of this trainer run one strategy")

    @property
    def experts(self) -> LayerStrategy | None:
        """A strategy with the degrees of the expert layers; None for a dense model."""
        rows = [
            Compared(layer.name, own, ("ep", "etp"))
            for layer, own in self.pairs
            if layer.experts is not None
        ]
        return self.shared(rows, "the experts of this trainer have one degree") if rows else None

    def recompute(self) -> str:
        """Return the recomputation that all blocks share.

        Errors:
            UnsupportedError: blocks differ.
        """
        kinds = sorted({strategy.recompute for strategy in self.blocks})
        if len(kinds) > 1:
            self.refuse(
                f"recompute is {' for some blocks and '.join(kinds)} for others, but this trainer has one "
                "setting for all"
            )
        return kinds[0]

    def require_abilities(self) -> None:
        """Refuse what the trainer's file in `conf/trainer/` says that it lacks."""
        if self.plan.inside_nodes and not self.trainer.inside_pipelines:
            self.refuse(
                f"{PIPELINES_INSIDE}, and its ranks count pp last",
                f"space.axis_order={PIPELINES_OUTSIDE}",
            )
        strategies = self._distinct_strategies()
        kinds = sorted({own.recompute for own in self.blocks})
        for strategy, kind in product(strategies, kinds):
            given = self.facts(replace(strategy, recompute=kind))
            for lack in self.trainer.lacks:
                if lack.holds(given):
                    self.refuse(lack.sentence(given), lack.instead)
        if self.trainer.executable:
            return  # its exporter asks `darts_parallel.run` for all other rules
        stage = str(strategies[0].zero_stage)
        self._require_exact_collectives(self.trainer.gradient_bits.get(stage, []))
        if self.plan.pp > 1:
            self._require_schedule(trainer_schedules(self.trainer))

    def _distinct_strategies(self) -> list[LayerStrategy]:
        """Return the strategies of layers with parameters, each once.

        A trainer of one strategy has it for all layers, but for the degrees of experts.
        """
        trained = [own for layer, own in self.pairs if layer.parameters(self.model.vocab_size) > 0]
        strategies = list(dict.fromkeys(trained))
        if self.trainer.layerwise:
            return strategies
        common = self.uniform()
        mixed = [replace(common, ep=own.ep, etp=own.etp) for own in strategies]
        return list(dict.fromkeys(mixed))

    def _require_exact_collectives(self, gradient_bits: Sequence[int]) -> None:
        """Refuse quantized collectives.

        Args:
            gradient_bits: Bits of gradients that the trainer has a switch for.
        """
        for name, known in (("tp_comm_bits", ()), ("grad_comm_bits", gradient_bits)):
            bits = min(getattr(strategy, name) for strategy in self.plan.layers)
            if bits < LOSSLESS and bits not in known:
                self.refuse(
                    f"{name}={bits}, and this trainer has no such quantized collectives",
                    f"space.{name}={LOSSLESS}",
                )

    def _require_schedule(self, known: Sequence[str]) -> None:
        """Refuse a schedule that is none of `known`."""
        several = any(find(name).chunks != 1 for name in known if name != SEARCHED)
        if self.plan.virtual_stages > 1 and not several:
            self.refuse(
                f"virtual_stages={self.plan.virtual_stages}, and this trainer's schedule does not interleave",
                "space.virtual_stages=1",
            )
        elif self.plan.schedule_name not in known:
            self.refuse(
                f"schedule={self.plan.schedule_name}, and this trainer runs {' and '.join(known)} alone"
                + self._closest_rule(),
                f"space.schedules=[{','.join(known)}]",
            )

    def _closest_rule(self) -> str:
        """Say in a clause which rule is closest to a searched order, and what it costs."""
        if self.plan.schedule_name != SEARCHED or self.price is None:
            return ""
        usual = replace(self.plan, schedule=None)
        try:
            own = self.price(self.plan)
            seconds = self.price(usual)
        except DartsParallelError:
            return ""
        slower = f"takes {seconds:.4g} s instead of {own:.4g} s"
        costs = slower if seconds < inf else "does not fit the memory"
        return f"; the closest rule, {usual.schedule_name} with the same stages, {costs}"


def _joined(ways: list[str]) -> str:
    """Join overrides of several ways out: of lists of one key their common values stay."""
    values: dict[str, list[str]] = {}
    for way in ways:
        first, _, _ = way.partition(" or ")
        for override in first.split():
            key, _, value = override.partition("=")
            mine = value.strip("[]").split(",")
            both = [entry for entry in values.get(key, mine) if entry in mine]
            values[key] = both or mine
    texts = []
    for key, entries in values.items():
        value = entries[0] if len(entries) == 1 else f"[{','.join(entries)}]"
        texts.append(f"{key}={value}")
    return " ".join(texts)
