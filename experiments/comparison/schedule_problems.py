"""List fourteen problems whose schedule is free: uneven or indivisible layers, tight memory, mixed GPUs.

Each pins what the trainer's user knows (degrees, micro-batches) and leaves schedules, chunks of any number
of layers and every layer's recomputation open. Where NVIDIA publishes how it cuts the model, the number of
chunks of that cut is among the free ones.
"""

from dataclasses import dataclass, replace
from functools import cached_property

from darts_parallel.cost import CostTable, build_tables
from darts_parallel.problem import Problem, load_problem
from experiments.comparison.problems import tight

SCHEDULES = "space.schedules=[1f1b,interleaved,zero_bubble_h1,zero_bubble_v,v_half,v_min,searched]"
FREE = ("space.zero_stage=1", "space.recompute=[none,full]", SCHEDULES)


@dataclass(frozen=True)
class ScheduleCase:
    """Name one problem; its cost tables are built where they are needed."""

    name: str
    given: tuple[str, ...]
    """Overrides next to `FREE`."""
    little_memory: bool = False
    layout: str = ""
    """Layout by NVIDIA, as `--pipeline-model-parallel-layout` writes it; empty: not published."""

    @cached_property
    def problem(self) -> Problem:
        """Load model, cluster, job and space."""
        problem = load_problem([*self.given, *FREE])
        return tight(problem) if self.little_memory else problem

    def tables(self) -> tuple[CostTable, ...]:
        """Build the cost tables of all schedules."""
        return tuple(build_tables(self.problem))


def _pins(pp: int, count: int, tp: int = 1) -> tuple[str, ...]:
    degrees = (f"space.pp={pp}", f"space.tp={tp}", f"space.num_micro_batches={count}")
    return (*degrees, f"space.sequence_parallel={str(tp > 1).lower()}")


def _model(name: str, cluster: str, *more: str) -> tuple[str, ...]:
    return (f"model={name}", f"training={name}", f"cluster={cluster}", *more)


def _batch(size: int) -> str:
    return f"training.global_batch_size={size}"


def _llama(name: str, layers: int, pp: int, count: int) -> ScheduleCase:
    # micro-batches of one sequence on every pipeline
    given = _model("llama3_8b", "h100_1x8", f"model.num_layers={layers}", _batch(count))
    return ScheduleCase(name, (*given, *_pins(pp, count)))


DEEPSEEK_V3 = "Et*3|(tt|)*29,m|L"
"""16 pipeline stages of 2 chunks (Megatron-LM, docs/user-guide/features/pipeline_parallel_layout.md)."""
LLAMA3_70B = "Et*4|(t*4|)*18t*4L"
"""4 stages of 5 equal chunks on 64 H100 (Megatron-Bridge, scripts/performance/configs/llama/
llama3_workload_base_configs.py, LLAMA3_70B_PRETRAIN_CONFIG_H100_BF16_V1)."""
LLAMA31_405B = "Et|(tt|)*62tL"
"""8 stages of 8 chunks on 1,024 H100 (llama31_workload_base_configs.py of the same folder,
LLAMA31_405B_PRETRAIN_CONFIG_H100_BF16_V1); its recipe counts embedding and loss as a block each
(`account_for_embedding_in_pipeline_split`), so that 126 + 2 divide by 64."""

LLAMA2 = _model("llama2_7b", "h100_1x8", _batch(32))
T5 = _model("t5_1_3b", "a10_4x4")
GPT = ("model=gpt2_xl", "training=gpt2_xl")

CASES: tuple[ScheduleCase, ...] = (
    ScheduleCase(
        "hybrid, Nemotron-H 8B", (*_model("nemotron_h_8b", "h100_1x8", _batch(16)), *_pins(8, 16))
    ),
    ScheduleCase(
        "hybrid, Nemotron-H 56B",
        (*_model("nemotron_h_56b", "h100_8x8", _batch(16)), *_pins(8, 16, 8)),
    ),
    ScheduleCase(
        "multi-token prediction, DeepSeek-V3",
        (
            *_model(
                "deepseek_v3",
                "h100_128x8",
                _batch(2048),
                "model.mtp_num_layers=1",
                "space.ep=64",
                "space.virtual_stages=[1,2]",
            ),
            *_pins(16, 32),
        ),
        layout=DEEPSEEK_V3,
    ),
    ScheduleCase(
        "large vocabulary, sliding windows, Gemma 3 27B",
        (*_model("gemma3_27b", "h100_8x8", _batch(16)), *_pins(8, 16, 8)),
    ),
    ScheduleCase(
        "large vocabulary, 32 layers", (*LLAMA2, "model.vocab_size=256000", *_pins(8, 16))
    ),
    _llama("43 layers", 43, 8, 16),
    _llama("61 layers", 61, 8, 32),
    _llama("78 layers", 78, 8, 16),
    replace(_llama("61 layers, tight memory", 61, 8, 16), little_memory=True),
    ScheduleCase("encoder-decoder, T5", (*T5, *_pins(8, 16))),
    ScheduleCase(
        "48 layers, tight memory, slow network",
        (*GPT, "cluster=a10_4x4", *_pins(8, 16)),
        little_memory=True,
    ),
    ScheduleCase("mixed GPUs", (*GPT, "cluster=a10_a100_mixed", *_pins(8, 16))),
    ScheduleCase(
        "Llama 3 70B",
        (
            *_model(
                "llama3_70b", "h100_8x8", _batch(32), "space.cp=2", "space.virtual_stages=[1,2,5]"
            ),
            *_pins(4, 16, 4),
        ),
        layout=LLAMA3_70B,
    ),
    ScheduleCase(
        "Llama 3.1 405B",
        (
            *_model(
                "llama3_405b",
                "h100_128x8",
                _batch(128),
                "space.cp=2",
                "space.virtual_stages=[1,2,8]",
            ),
            *_pins(8, 16, 8),
        ),
        layout=LLAMA31_405B,
    ),
)
