"""Expert-parallel and expert tensor-parallel degrees that a problem admits."""

from darts_parallel.config import SpaceConfig
from darts_parallel.errors import PlanError
from darts_parallel.plans.degrees import divisors, node_sizes, refused_pin
from darts_parallel.plans.strategy import LayerStrategy
from darts_parallel.problem import Cluster, Experts, Model


def expert_layer(model: Model) -> Experts | None:
    """Return the experts of the model's expert layers, which are all alike; None for a dense model."""
    return next((layer.experts for layer in model.layers if layer.experts is not None), None)


def legal_expert_degrees(
    model: Model, cluster: Cluster, stage_devices: int
) -> list[tuple[int, int]]:
    """Return the pairs `(ep, etp)` that the experts admit on a stage, pinned or not.

    Megatron-LM's rules: ep divides the experts, etp their width, and etp * ep the devices of the stage, which
    hold `edp` copies of them; groups of split experts divide a node. A dense model has the pair (1, 1).

    Args:
        stage_devices: GPUs of a stage, `tp * cp * dp`.
    """
    experts, sizes = expert_layer(model), node_sizes(cluster)
    if experts is None:
        return [(1, 1)]
    return [
        (ep, etp)
        for etp in divisors(stage_devices)
        if experts.width % etp == 0 and any(size % etp == 0 for size in sizes)
        for ep in divisors(stage_devices // etp)
        if experts.count % ep == 0
    ]


def expert_degrees(
    space: SpaceConfig, model: Model, cluster: Cluster, stage_devices: int
) -> list[tuple[int, int]]:
    """Return the pairs of `legal_expert_degrees` that the pins allow."""
    ep, etp = space.pinned("ep"), space.pinned("etp")
    legal = legal_expert_degrees(model, cluster, stage_devices)
    return [
        pair for pair in legal if (ep is None or pair[0] in ep) and (etp is None or pair[1] in etp)
    ]


def require_expert_pins(space: SpaceConfig, model: Model, cluster: Cluster) -> None:
    """Refuse pinned expert degrees that no stage admits.

    Errors:
        ConfigError: names the key, its value, the rule and the closest valid value.
    """
    devices, experts = cluster.num_devices, expert_layer(model)
    legal = [
        pair for size in divisors(devices) for pair in legal_expert_degrees(model, cluster, size)
    ]
    rules = {
        "ep": "be 1, since the model has no experts",
        "etp": "be 1, since the model has no experts",
    }
    if experts is not None:
        rules = {
            "ep": f"divide model.num_experts={experts.count} and the {devices} GPUs",
            "etp": f"divide the experts' width {experts.width} and the GPUs of a node",
        }
    for place, key in enumerate(("ep", "etp")):
        pinned = space.pinned(key)
        members = sorted({pair[place] for pair in legal})
        if pinned is not None and not set(pinned) & set(members):
            raise refused_pin(key, pinned[0], rules[key], members)


def check_experts(
    name: str, strategy: LayerStrategy, model: Model, cluster: Cluster, size: int
) -> None:
    """Refuse expert degrees that the experts or the stage of `size` GPUs do not admit in Megatron-LM.

    Errors:
        PlanError: names the layer, its degrees, the rule and the closest valid ones.
    """
    legal = legal_expert_degrees(model, cluster, size)
    if (strategy.ep, strategy.etp) not in legal:
        near = min(legal, key=lambda pair: abs(pair[1] - strategy.etp) + abs(pair[0] - strategy.ep))
        rule = "be 1, since the model has no experts"
        experts = expert_layer(model)
        if experts is not None:
            rule = (
                f"divide the {experts.count} experts, their width {experts.width} and, as a product, the "
                f"{size} GPUs of a stage"
            )
        raise PlanError(
            f"plan: {name} has ep={strategy.ep} and etp={strategy.etp}, which must {rule}; try "
            f"ep={near[0]} and etp={near[1]}."
        )
    if not model.has_experts:
        return
    if strategy.tp > 1 and not strategy.sequence_parallel:
        raise PlanError(
            f"plan: {name} has tp={strategy.tp} without sequence parallelism, which a model with experts "
            "needs; try sequence_parallel=true."
        )
    if strategy.shard_size:
        raise PlanError(
            f"plan: {name} has shard_size={strategy.shard_size}, which must be 0 in a model with experts; "
            "try 0."
        )
