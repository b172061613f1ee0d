"""Whether a plan belongs to a problem: layers, devices, heads, batch, rare parts of models."""

from collections.abc import Collection, Iterator, Sequence

from darts_parallel.config import (
    LOSSLESS,
    MAMBA,
    CostConfig,
    ModelConfig,
    TrainingConfig,
    as_yaml,
    module_data,
    read_trainer,
)
from darts_parallel.errors import PlanError, UnsupportedError, closest, require_listed
from darts_parallel.plans._expert_degrees import check_experts
from darts_parallel.plans._fields import Fields
from darts_parallel.plans.degrees import (
    context_degrees,
    divides_nodes,
    divisors,
    legal_tensor_degrees,
)
from darts_parallel.plans.strategy import LayerStrategy, Plan, degrees, read_strategy
from darts_parallel.problem import Cluster, MeasuredTimes, Model, Problem, order_inside_nodes

PARTS: dict[str, str] = module_data(__file__)
"""Parts of models in words, by key of the model."""


def parts_beyond(config: ModelConfig, known: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield the keys of a model's parts that are not `known`, and each part in words."""
    for key, words in PARTS.items():
        if key not in known and _has(config, key):
            yield key, words


def _has(config: ModelConfig, key: str) -> bool:
    """Return whether a model has the part of a key."""
    value = getattr(config, key)
    if key == "block_norms":
        return value not in (None, 2)
    if key == "v_head_dim":
        return bool(value) and not config.multi_latent_attention
    if key == "norm_scale":
        return not value
    if key == "qk_norm_whole":
        return config.qk_norm and bool(value)
    if key == "mamba_dt_rank":
        return value is not None and MAMBA in (config.hybrid_override_pattern or "")
    if key in ("mlp_bias", "attention_output_bias"):
        return value not in (None, config.linear_bias)
    return bool(value)


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
    devices = cluster.num_devices
    layers = model.layers
    if len(plan.layers) != len(layers):
        raise PlanError(
            f"plan: it has {len(plan.layers)} layers but model={model.config.name} has {len(layers)} "
            "(embedding, blocks, head and loss)."
        )
    Fields(vars(plan)).read("num_micro_batches", int, 1)
    if plan.virtual_stages > 1:
        _check_chunks(plan)
    rule = f"plan: pp={plan.pp} must divide the {devices} GPUs"
    require_listed(plan.pp, divisors(devices), rule, PlanError)
    rule = (
        f"plan: cp={plan.cp} must divide the {devices} GPUs and, twice where attention is causal, "
        f"training.seq_len={training.seq_len}"
    )
    contexts = context_degrees(model, devices, training.seq_len)
    require_listed(plan.cp, contexts, rule, PlanError)
    _check_placement(plan, cluster)
    for first in plan.boundaries[1:-1]:
        if layers[first].fused_to_previous:
            raise PlanError(
                f"plan: a stage begins at layer {first} ({layers[first].name}), which must stay with "
                f"{layers[first - 1].name}; try {first - 1}."
            )
    tensor = legal_tensor_degrees(model, cluster, measured)
    size = devices // plan.pp
    for (strategy, gpus), name in _distinct_strategies(plan, model, cluster).items():
        read_strategy(vars(strategy), f"{name}.")
        legal = [tp for tp in tensor if divides_nodes(tp, gpus)]
        _check_strategy(name, strategy, plan, size, training, legal)
        check_experts(name, strategy, model, cluster, size)


def _distinct_strategies(
    plan: Plan, model: Model, cluster: Cluster
) -> dict[tuple[LayerStrategy, int], str]:
    """Return each strategy with the GPUs of its nodes, and the name of the first such layer."""
    arranged = cluster.arranged(plan.node_order)
    gpus = [arranged.stage_group(stage, plan.pp).gpus for stage in range(plan.pp)]
    named: dict[tuple[LayerStrategy, int], str] = {}
    for spec, strategy, stage in zip(model.layers, plan.layers, plan.stage_of_layer, strict=True):
        named.setdefault((strategy, gpus[stage]), spec.name)
    return named


def _check_placement(plan: Plan, cluster: Cluster) -> None:
    """Refuse an order of the nodes that does not name every node once, or once a stage.

    No search proposes a stage that mixes node types; a given plan may have one, which its slowest
    member decides (`Cluster.stage_topology`).
    """
    nodes = len(cluster.node_types)
    if plan.inside_nodes:
        share = cluster.groups[0].gpus // plan.pp
        whole = all(share % (layer.tp * plan.cp) == 0 for layer in plan.layers)
        if plan.node_order == order_inside_nodes(cluster, plan.pp) and whole:
            return
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
    name: str,
    strategy: LayerStrategy,
    plan: Plan,
    size: int,
    training: TrainingConfig,
    tensor: Sequence[int],
) -> None:
    """Refuse a strategy that does not fit a stage of `size` GPUs, the global batch or the sequence.

    Args:
        tensor: Tensor-parallel degrees that the nodes of the stage admit.
    """
    copies = strategy.dp * plan.cp
    ranks = strategy.tp * copies
    if ranks != size:
        tp = closest(strategy.tp, divisors(size))
        raise PlanError(
            f"plan: {name} has {degrees(strategy, plan.cp)} = {ranks}, but a stage has {size} GPUs; "
            f"try tp={tp} and dp={max(size // (tp * plan.cp), 1)}."
        )
    if strategy.shard_size:
        rule = (
            f"plan: {name} has shard_size={strategy.shard_size}, which must divide its "
            f"{copies} data-parallel ranks"
        )
        require_listed(strategy.shard_size, divisors(copies), rule, PlanError)
    rule = (
        f"plan: {name} has tp={strategy.tp}, which must divide the heads, the KV heads, the MLP width and "
        "the GPUs of a node (or consist of whole nodes)"
    )
    require_listed(strategy.tp, tensor, rule, PlanError)
    seq_len = training.seq_len
    if strategy.sequence_parallel and seq_len % (strategy.tp * plan.cp):
        raise PlanError(
            f"plan: {name} has sequence_parallel=true with tp={strategy.tp} and cp={plan.cp}, which must "
            f"divide training.seq_len={seq_len}; try sequence_parallel=false."
        )
    batch = training.global_batch_size
    step = strategy.dp * plan.num_micro_batches
    if batch % step:
        near = f"training.global_batch_size={step * max(round(batch / step), 1)}"
        if batch % strategy.dp == 0:
            count = closest(plan.num_micro_batches, divisors(batch // strategy.dp))
            near = f"num_micro_batches={count}"
        raise PlanError(
            f"plan: dp({strategy.dp}) * num_micro_batches({plan.num_micro_batches}) of {name} must divide "
            f"training.global_batch_size={batch}; try {near}."
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
"""Keys of models with experts, and the values that `run` builds: a softmax routes, no token is
dropped."""


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
    sharded_gradients = any(layer.zero_stage > 1 for layer in plan.layers)
    if plan.pp > 1 and plan.passes.splits and sharded_gradients:
        raise UnsupportedError(
            f"plan: schedule={plan.schedule_name} splits backward passes, and with zero_stage=2 or 3 PyTorch "
            "reduces gradients before those of the weights are there; try space.zero_stage=[0,1]."
        )
    for spec, strategy in zip(problem.model.layers, plan.layers, strict=True):
        dense = spec.name.startswith("layers.") and spec.experts is None
        _refuse_bits(spec.name, strategy, block=dense)


def _refuse_blocks(plan: Plan, block: int) -> None:
    """Refuse few bits in blocks of another size than those that are sent here."""
    sent = CostConfig.lossy_block
    lossy = any(min(own.tp_comm_bits, own.grad_comm_bits) < LOSSLESS for own in plan.layers)
    if lossy and block != sent:
        raise UnsupportedError(
            f"cost.lossy_block={block} cannot run here, where {sent} numbers share a scale; try {sent}."
        )


def _refuse_bits(name: str, strategy: LayerStrategy, *, block: bool) -> None:
    """Refuse quantized collectives that do not run: see `darts_parallel.run._lossy`.

    Args:
        block: The layer is a block without experts.

    Errors:
        UnsupportedError: names the layer and the nearest plan that can run.
    """
    exact = LOSSLESS
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
    whole = strategy.zero_stage <= 1 and not strategy.shard_size
    if sent < exact and not whole:
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
    rules = read_trainer("torch")
    optimizers = rules.switches["optimizer"]
    if training.optimizer not in optimizers:
        raise UnsupportedError(
            f"training.optimizer={training.optimizer} cannot run here, where it is one of "
            f"{', '.join(optimizers)}; try adam."
        )
    unbuilt = [key for key, _ in parts_beyond(config, rules.model_parts)]
    if config.num_experts is not None:
        unbuilt += _unbuilt_routing(config)
    if unbuilt:
        key = unbuilt[0]
        near = BUILT_EXPERTS.get(key, ModelConfig.__dataclass_fields__[key].default)
        raise UnsupportedError(
            f"model={config.name} has model.{key}={getattr(config, key)}, which no block that can run here "
            f"has; try {as_yaml(near)}."
        )


def _unbuilt_routing(config: ModelConfig) -> list[str]:
    """List the keys of expert layers whose values `run` does not build."""
    return [
        key for key, built in BUILT_EXPERTS.items() if getattr(config, key) not in (built, None)
    ]
