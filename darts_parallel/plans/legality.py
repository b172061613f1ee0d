"""Whether a plan belongs to a problem: layers, devices, heads, batch, parts that few trainers have."""

from collections.abc import Callable, Collection, Iterator, Sequence

from darts_parallel.config import (
    COMM_BITS,
    MAMBA,
    CostConfig,
    ModelConfig,
    TrainingConfig,
    read_trainer,
)
from darts_parallel.errors import PlanError, UnsupportedError, closest
from darts_parallel.plans._expert_degrees import check_experts
from darts_parallel.plans.degrees import context_degrees, divisors, legal_tensor_degrees
from darts_parallel.plans.strategy import LayerStrategy, Plan, degrees
from darts_parallel.problem import Cluster, MeasuredTimes, Model, Problem

PARTS: dict[str, tuple[Callable[[ModelConfig], bool], str]] = {
    "inputs": (lambda c: c.inputs is not None, "blocks of your own"),
    "hybrid_override_pattern": (
        lambda c: c.hybrid_override_pattern is not None,
        "layers of different kinds",
    ),
    "mamba_dt_rank": (
        lambda c: c.mamba_dt_rank is not None and MAMBA in (c.hybrid_override_pattern or ""),
        "Mamba-1 layers",
    ),
    "sliding_window": (lambda c: c.sliding_window is not None, "windowed attention"),
    "mtp_num_layers": (lambda c: c.mtp_num_layers > 0, "multi-token prediction"),
    "block_norms": (lambda c: c.block_norms not in (None, 2), "another number of norms in a block"),
    "norm_scale": (lambda c: not c.norm_scale, "norms without weights"),
    "qk_norm_whole": (
        lambda c: c.qk_norm and c.qk_norm_whole,
        "norms over all heads of queries and keys",
    ),
    "attention_gate_size": (
        lambda c: c.attention_gate_size is not None,
        "a gate on attention's output",
    ),
    "activation_parameters": (
        lambda c: c.activation_parameters > 0,
        "trained activation functions",
    ),
    "embedding_norm": (lambda c: c.embedding_norm, "a norm behind the embedding"),
    "attention_sinks": (lambda c: c.attention_sinks, "a learned logit in every head's softmax"),
    "indexer_num_heads": (
        lambda c: c.indexer_num_heads is not None,
        "sparse attention with an indexer",
    ),
    "mlp_bias": (
        lambda c: c.mlp_bias not in (None, c.linear_bias),
        "biases in the MLP that differ from attention's",
    ),
    "position_offset": (lambda c: c.position_offset > 0, "positions that do not begin at 0"),
    "attention_output_bias": (
        lambda c: c.attention_output_bias not in (None, c.linear_bias),
        "a bias after attention that differs from the others",
    ),
}
"""Key of the model, whether a model has the part, and the part in words."""


def parts_beyond(config: ModelConfig, known: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield the keys of a model's parts that are not `known`, and each part in words."""
    for key, (has, words) in PARTS.items():
        if key not in known and has(config):
            yield key, words


def check_plan(
    plan: Plan,
    model: Model,
    cluster: Cluster,
    training: TrainingConfig,
    measured: MeasuredTimes | None,
) -> None:
    """Refuse a plan that does not belong to a job on a cluster, with one sentence.

    Errors:
        PlanError: names the field, its value, the rule and the closest valid value.
    """
    devices, layers = cluster.num_devices, model.layers
    if len(plan.layers) != len(layers):
        raise PlanError(
            f"plan: it has {len(plan.layers)} layers but model={model.config.name} has {len(layers)} "
            "(embedding, blocks, head and loss)."
        )
    if plan.virtual_stages > 1:
        _check_chunks(plan)
    if devices % plan.pp:
        near = closest(plan.pp, divisors(devices))
        raise PlanError(f"plan: pp={plan.pp} must divide the {devices} GPUs; try {near}.")
    contexts = context_degrees(model, devices, training.seq_len)
    if plan.cp not in contexts:
        near = closest(plan.cp, contexts)
        raise PlanError(
            f"plan: cp={plan.cp} must divide the {devices} GPUs and, twice where attention is causal, "
            f"training.seq_len={training.seq_len}; try {near}."
        )
    _check_placement(plan, cluster)
    for first in plan.boundaries[1:-1]:
        if layers[first].fused_to_previous:
            raise PlanError(
                f"plan: a stage begins at layer {first} ({layers[first].name}), which must stay with "
                f"{layers[first - 1].name}; try {first - 1}."
            )
    arranged = cluster.arranged(plan.node_order)
    nodes = [arranged.stage_group(k, plan.pp).gpus for k in range(plan.pp)]
    # equal strategies of equal nodes once, under the name of their first layer
    named: dict[tuple[LayerStrategy, int], str] = {}
    for spec, strategy, stage in zip(layers, plan.layers, plan.stage_of_layer, strict=True):
        named.setdefault((strategy, nodes[stage]), spec.name)
    legal, size = legal_tensor_degrees(model, cluster, measured), devices // plan.pp
    for (strategy, gpus), name in named.items():
        here = [tp for tp in legal if gpus % tp == 0 or tp % gpus == 0]
        _check_strategy(name, strategy, plan, size, training.global_batch_size, here)
        check_experts(name, strategy, model, cluster, size)


def _check_placement(plan: Plan, cluster: Cluster) -> None:
    """Refuse an order of the nodes that does not name every node once.

    No search proposes a stage that mixes node types; a given plan may have one, which its slowest member
    decides (`Cluster.stage_topology`).
    """
    nodes = len(cluster.node_types)
    if plan.node_order and sorted(plan.node_order) != list(range(nodes)):
        raise PlanError(
            f"plan: node_order={list(plan.node_order)} must name each of the {nodes} nodes once; try "
            f"{list(range(nodes))}."
        )


def _check_chunks(plan: Plan) -> None:
    if plan.pp == 1:
        raise PlanError(
            f"plan: virtual_stages={plan.virtual_stages} must be 1 where pp is 1; try 1."
        )
    if sentence := plan.passes.count_refusal(plan.pp, plan.num_micro_batches):
        raise PlanError(sentence)


def _check_strategy(
    name: str, strategy: LayerStrategy, plan: Plan, size: int, batch: int, tensor: Sequence[int]
) -> None:
    ranks = strategy.tp * plan.cp * strategy.dp
    if ranks != size:
        raise PlanError(
            f"plan: {name} has {degrees(strategy, plan.cp)} = {ranks}, but a stage has {size} GPUs; "
            f"try dp={max(size // (strategy.tp * plan.cp), 1)}."
        )
    if strategy.shard_size and (strategy.dp * plan.cp) % strategy.shard_size:
        near = closest(strategy.shard_size, divisors(strategy.dp * plan.cp))
        raise PlanError(
            f"plan: {name} has shard_size={strategy.shard_size}, which must divide its "
            f"{strategy.dp * plan.cp} data-parallel ranks; try {near}."
        )
    if strategy.tp not in tensor:
        near = closest(strategy.tp, tensor)
        raise PlanError(
            f"plan: {name} has tp={strategy.tp}, which must divide the heads, the KV heads and the GPUs "
            f"of a node (or consist of whole nodes); try {near}."
        )
    if batch % (strategy.dp * plan.num_micro_batches):
        near = max(
            (m for m in divisors(batch) if batch % (m * strategy.dp) == 0),
            key=lambda m: -abs(m - plan.num_micro_batches),
            default=1,
        )
        raise PlanError(
            f"plan: dp({strategy.dp}) * num_micro_batches({plan.num_micro_batches}) of {name} must divide "
            f"training.global_batch_size={batch}; closest valid num_micro_batches: {near}."
        )


BUILT_EXPERTS: dict[str, object] = {
    "linear_bias": False,
    "moe_router_num_groups": None,
    "moe_router_enable_expert_bias": False,
    "moe_expert_capacity_factor": None,
    "moe_router_score_function": None,
    "moe_router_pre_softmax": False,
    "moe_router_topk_scaling_factor": None,
}
"""Keys of models with experts, and the values that `run` builds: a softmax routes, no token is dropped."""


def refuse_unexecutable(plan: Plan, problem: Problem) -> None:
    """Refuse a plan that `darts_parallel.run` cannot execute, before any process starts.

    Errors:
        PlanError: the plan does not belong to the problem.
        UnsupportedError: names what cannot run and the nearest plan that can.
    """
    refuse_model(problem.model, problem.training)
    if plan.cp > 1:
        raise UnsupportedError(f"plan: cp={plan.cp} cannot run here yet; try 1 (space.cp=1).")
    if plan.node_order:
        raise UnsupportedError(
            f"plan: node_order={list(plan.node_order)} cannot run, since whoever starts the processes "
            "numbers them; try space.node_orders=given."
        )
    check_plan(plan, problem.model, problem.cluster, problem.training, problem.measured)
    if plan.offload:
        raise UnsupportedError(
            "plan: it keeps shares of activations or optimizer state in host memory, which nothing here "
            "moves; try space.offload=null."
        )
    _refuse_blocks(plan, problem.config.cost.lossy_block)
    if plan.pp > 1 and plan.passes.splits and any(layer.zero_stage > 1 for layer in plan.layers):
        raise UnsupportedError(
            f"plan: schedule={plan.schedule_name} splits backward passes, and with zero_stage=2 or 3 PyTorch "
            "reduces gradients before those of the weights are there; try space.zero_stage=[0,1]."
        )
    for spec, strategy in zip(problem.model.layers, plan.layers, strict=True):
        dense = spec.name.startswith("layers.") and spec.experts is None
        _refuse_bits(spec.name, strategy, block=dense)
        if strategy.sequence_parallel and problem.training.seq_len % strategy.tp:
            raise UnsupportedError(
                f"plan: {spec.name} has sequence_parallel=true with tp={strategy.tp}, which must divide "
                f"training.seq_len={problem.training.seq_len}; try sequence_parallel=false."
            )


def _refuse_blocks(plan: Plan, block: int) -> None:
    """Refuse few bits in blocks of another size than those that are sent here."""
    sent = CostConfig.lossy_block
    lossy = any(min(own.tp_comm_bits, own.grad_comm_bits) < max(COMM_BITS) for own in plan.layers)
    if lossy and block != sent:
        raise UnsupportedError(
            f"cost.lossy_block={block} cannot run here, where {sent} numbers share a scale; try {sent}."
        )


def _refuse_bits(name: str, strategy: LayerStrategy, *, block: bool) -> None:
    """Refuse few bits where no collective of theirs runs: see `darts_parallel.run._lossy`.

    Errors:
        UnsupportedError: names the layer and the nearest plan that can run.
    """
    exact = max(COMM_BITS)
    sums = strategy.tp_comm_bits if strategy.tp > 1 else exact
    sent = strategy.grad_comm_bits if strategy.dp > 1 else exact
    if not block and min(sums, sent) < exact:
        key = "tp_comm_bits" if sums < exact else "grad_comm_bits"
        raise UnsupportedError(
            f"plan: {name} has {key}={min(sums, sent)}, but only dense blocks send few bits here; try "
            f"{exact}."
        )
    if sums < exact and strategy.sequence_parallel:
        raise UnsupportedError(
            f"plan: {name} has tp_comm_bits={sums} with sequence_parallel=true, whose gathers carry normed "
            "states, which are sent whole here; try space.sequence_parallel=false."
        )
    if sent < exact and (strategy.zero_stage > 1 or strategy.shard_size):
        key = "zero_stage" if strategy.zero_stage > 1 else "shard_size"
        raise UnsupportedError(
            f"plan: {name} has grad_comm_bits={sent} with {key}={getattr(strategy, key)}, whose gradients "
            "PyTorch reduces whole; try space.zero_stage=[0,1] space.shard_size=0."
        )


def refuse_model(model: Model, training: TrainingConfig) -> None:
    """Refuse a model that `darts_parallel.run` does not build.

    Errors:
        UnsupportedError: names the key.
    """
    config = model.config
    for key in ("num_encoder_layers", "relative_position_buckets", "multi_latent_attention"):
        value = getattr(config, key)
        if value:
            raise UnsupportedError(
                f"model={config.name} has model.{key}={value}, and only one chain of blocks can run here; "
                "try 0."
            )
    if training.lora_rank:
        raise UnsupportedError(
            f"training.lora_rank={training.lora_rank} cannot run here, where every weight is trained; try 0."
        )
    experts = config.num_experts is not None
    unbuilt = [key for key, _ in parts_beyond(config, read_trainer("torch").model_parts)]
    unbuilt += [
        k for k, near in BUILT_EXPERTS.items() if experts and getattr(config, k) not in (near, None)
    ]
    for key in unbuilt:
        near = BUILT_EXPERTS.get(key, ModelConfig.__dataclass_fields__[key].default)
        raise UnsupportedError(
            f"model={config.name} has model.{key}={getattr(config, key)}, which no block that can run here "
            f"has; try {'null' if near is None else str(near).lower()}."
        )
