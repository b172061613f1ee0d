"""Twelve problems whose schedule is free: layers that do not divide, large vocabularies, mixed GPUs.

Each pins what the trainer's user knows (degrees, micro-batches) and leaves schedules, chunks of any number of
layers and every layer's recomputation open.
"""

from dataclasses import dataclass, replace

from darts_parallel.cost.table import CostTable
from darts_parallel.problem.problem import load_problem
from experiments.comparison.problems import tables_of, tight

SCHEDULES = "space.schedules=[1f1b,interleaved,zero_bubble_h1,zero_bubble_v,v_half,v_min]"
FREE = ("space.zero_stage=1", "space.sequence_parallel=false", "space.recompute=[none,full]", SCHEDULES)


@dataclass(frozen=True)
class ScheduleCase:
    """One problem by name; its cost tables are built where they are needed."""

    name: str
    given: tuple[str, ...]
    """Overrides beside `FREE`."""
    little_memory: bool = False
    space: str = "layerwise"

    def tables(self) -> tuple[CostTable, ...]:
        """Cost tables of all schedules."""
        problem = load_problem([*self.given, *FREE])
        return tables_of(tight(problem) if self.little_memory else problem)


def _llama(name: str, layers: int, pp: int, count: int, cluster: str = "h100_1x8") -> ScheduleCase:
    model = ("model=llama3_8b", "training=llama3_8b", f"model.num_layers={layers}", f"cluster={cluster}")
    # micro-batches of one sequence on every pipeline
    return ScheduleCase(name, (*model, f"training.global_batch_size={count}", *_pins(pp, count)))


def _pins(pp: int, count: int, tp: int = 1) -> tuple[str, ...]:
    return (f"space.pp={pp}", f"space.tp={tp}", f"space.num_micro_batches={count}")


GPT = ("model=gpt2_xl", "training=gpt2_xl")
LLAMA2 = ("model=llama2_7b", "training=llama2_7b", "training.global_batch_size=32")
T5 = ("model=t5_1_3b", "training=t5_1_3b")
MIXED = ("cluster=a10_a100_mixed",)

CASES: tuple[ScheduleCase, ...] = (
    ScheduleCase("large vocabulary, 32 layers", (*LLAMA2, "model.vocab_size=256000", "cluster=h100_1x8",
                                                 *_pins(8, 16))),
    ScheduleCase("small vocabulary, 32 layers", (*LLAMA2, "cluster=h100_1x8", *_pins(8, 32))),
    _llama("43 layers", 43, 8, 16),
    _llama("61 layers", 61, 8, 32),
    _llama("78 layers", 78, 8, 16),
    replace(_llama("61 layers, tight memory", 61, 8, 16), little_memory=True),
    _llama("43 layers, few micro-batches", 43, 8, 8),
    ScheduleCase("encoder-decoder", (*T5, "cluster=a10_4x4", *_pins(8, 16))),
    ScheduleCase("encoder-decoder, 4 stages", (*T5, "cluster=a10_4x4", *_pins(4, 8))),
    ScheduleCase("48 layers on a slow network", (*GPT, "cluster=a10_4x4", *_pins(8, 16))),
    ScheduleCase("48 layers, tight memory", (*GPT, "cluster=a10_4x4", *_pins(8, 16)), little_memory=True),
    ScheduleCase("mixed GPUs", (*GPT, *MIXED, *_pins(8, 16))),
)  # fmt: skip
