"""DeepSpeed: its JSON, and Python that loads the model or splits the layers of a pipeline.

Rules, as DeepSpeed 0.19.8 checks them (`deepspeed/runtime/config.py`, `runtime/engine.py`):
`train_batch_size` is micro-batch x accumulation x all processes, tensor-parallel ones too, so that
it is left out with AutoTP (`tensor_parallel.autotp_size`); gradients are kept in another type than
the model's only under ZeRO; its pipeline engine runs ZeRO up to 1; optimizers that are not its own
need a word with ZeRO.
"""

import json

from darts_parallel.errors import Entries
from darts_parallel.export.common import Exported, Request
from darts_parallel.export.huggingface import half_type, imports, model_text
from darts_parallel.plans import LayerStrategy

QUANTIZED_GRADIENT_BITS = 4
"""Bits of `zero_quantized_gradients`, ZeRO-3 alone (qgZ of ZeRO++, Wang et al. 2023, arXiv
2306.10209)."""

PIPELINE = '''"""DeepSpeed pipeline of a plan."""

{headline}

from collections.abc import Sequence
from typing import Any

from deepspeed.pipe import PipelineModule

PARTS = {parts}
"""First layer of every stage, and the end: embedding, blocks, head."""


class PlannedPipeline(PipelineModule):
    """Stages as the plan cuts them; DeepSpeed has no setting for that."""

    def _partition_layers(self, method: str = "plan") -> None:
        stage = self._topo.get_coord(self.global_rank).pipe
        self.parts = PARTS
        self._set_bounds(start=PARTS[stage], stop=PARTS[stage + 1])


def planned_pipeline(layers: Sequence[Any], loss_fn: Any, block: str) -> PlannedPipeline:
    """The module for deepspeed.initialize: {layers} layers (LayerSpec, TiedLayerSpec or modules).

    Args:
        layers: Embedding, blocks and head in order.
        loss_fn: Of output and labels.
        block: Name of the class of the blocks, which alone are recomputed.
    """
    if len(layers) != PARTS[-1]:
        raise ValueError(f"{{len(layers)}} layers, but the plan has {{PARTS[-1]}}")
    return PlannedPipeline(
        layers=list(layers),
        num_stages={plan.pp},
        loss_fn=loss_fn,
        activation_checkpoint_interval={interval},
        checkpointable_layers=[block],
    )
'''


def export(job: Request) -> Exported:
    """Write `deepspeed.json`, and `deepspeed_model.py`, or `deepspeed_pipeline.py` for several stages.

    Errors:
        UnsupportedError: DeepSpeed cannot express it.
    """
    strategy = job.uniform()
    job.recompute()
    job.settle()
    files = {"deepspeed.json": json.dumps(settings(job, strategy), indent=2) + "\n"}
    notes = [
        "the learning rate is yours: pass planned_optimizer(model, lr=...) to deepspeed.initialize"
    ]
    if job.plan.pp > 1:
        files["deepspeed_pipeline.py"] = _pipeline(job)
    else:
        files["deepspeed_model.py"] = _model(job)
    return Exported(files, tuple(notes))


def settings(job: Request, strategy: LayerStrategy) -> Entries:
    """Return the content of the JSON."""
    training = job.training
    zero: Entries = {
        "stage": strategy.zero_stage,
        "overlap_comm": True,
        "reduce_scatter": True,
    }
    if strategy.grad_comm_bits == QUANTIZED_GRADIENT_BITS:
        zero["zero_quantized_gradients"] = True
    values: Entries = {}
    if share := job.plan.offloaded_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True, "ratio": share}
        values["zero_force_ds_cpu_optimizer"] = False
    if strategy.tp == 1:
        values["train_batch_size"] = training.global_batch_size
    values["train_micro_batch_size_per_gpu"] = job.micro_batch_size(strategy)
    values["gradient_accumulation_steps"] = job.plan.num_micro_batches
    values["zero_optimization"] = zero
    if job.experts is not None:
        values["expert_parallel"] = {"enabled": True, "autoep_size": job.experts.ep}
    if strategy.tp > 1:
        values["tensor_parallel"] = {"autotp_size": strategy.tp}
    if training.optimizer != "adam" and strategy.zero_stage:
        values["zero_allow_untested_optimizer"] = True
    return values | _precision(job, strategy)


def _precision(job: Request, strategy: LayerStrategy) -> Entries:
    """Return the settings of precision: of products, and of accumulated gradients."""
    precision = job.training.precision
    if precision == "fp32":
        return {}
    values: Entries = {precision: {"enabled": True}}
    narrow = job.problem.software.gradient_bits == 16
    if precision == "bf16" and (strategy.zero_stage or narrow):
        values["data_types"] = {"grad_accum_dtype": "bf16" if narrow else "fp32"}
    return values


def _pipeline(job: Request) -> str:
    """Write a `PipelineModule` with the plan's stages; the loss is its `loss_fn`, not a layer."""
    layers = len(job.problem.model.layers) - 1
    parts = [min(boundary, layers) for boundary in job.plan.boundaries]
    interval = int(job.recompute() == "full")
    given = {"headline": job.headline(), "parts": parts, "plan": job.plan}
    return PIPELINE.format(layers=layers, interval=interval, **given)


def _model(job: Request) -> str:
    """Write the module that loads the model; DeepSpeed casts it and keeps the master weights."""
    title = '"""Model of a plan for deepspeed.initialize."""'
    lines = [title, "", job.headline(), "", *imports(job)]
    return "\n".join(lines) + "\n" + model_text(job, half_type(job), checkpointing=True)
