"""Expert-parallel and expert tensor-parallel degrees that a problem admits."""

from typing import NamedTuple

from darts_parallel.config import SpaceConfig
from darts_parallel.errors import PlanError
from darts_parallel.plans.degrees import divisors, node_sizes, refused_pin
from darts_parallel.plans.strategy import LayerStrategy
from darts_parallel.problem import Cluster, Experts, Model

NO_EXPERTS = "be 1, since the model has no experts"


class ExpertDegrees(NamedTuple):
    """Degrees of expert layers."""

    ep: int
    etp: int


def expert_layer(model: Model) -> Experts | None:
    """Return the experts of the model's expert layers (all alike); None for a dense model."""
    return next((layer.experts for layer in model.layers if layer.experts is not None), None)


def legal_expert_degrees(model: Model, cluster: Cluster, stage_devices: int) -> list[ExpertDegrees]:
    """Return the degrees that the experts admit on a stage, pinned or not.

    Megatron-LM's rules: ep divides the experts, etp their width, and etp * ep the devices of the
    stage, which
    hold `edp` copies of them; groups of split experts divide a node. A dense model has the degrees
    (1, 1).

    Args:
        stage_devices: GPUs of a stage, `tp * cp * dp`.
    """
    experts = expert_layer(model)
    if experts is None:
        return [ExpertDegrees(1, 1)]
    legal = []
    for etp in divisors(stage_devices):
        in_node = any(size % etp == 0 for size in node_sizes(cluster))
        if experts.width % etp or not in_node:
            continue
        groups = divisors(stage_devices // etp)
        legal += [ExpertDegrees(ep, etp) for ep in groups if experts.count % ep == 0]
    return legal


def expert_degrees(
    space: SpaceConfig, model: Model, cluster: Cluster, stage_devices: int
) -> list[ExpertDegrees]:
    """Return the degrees of `legal_expert_degrees` that the pins allow."""
    legal = legal_expert_degrees(model, cluster, stage_devices)
    for key in ExpertDegrees._fields:
        legal = [own for own in legal if space.only(key, [getattr(own, key)])]
    return legal


def require_expert_pins(space: SpaceConfig, model: Model, cluster: Cluster) -> None:
    """Refuse pinned expert degrees that no stage admits.

    Errors:
        ConfigError: names the key, its value, the rule and the closest valid value.
    """
    devices = cluster.num_devices
    legal: list[ExpertDegrees] = []
    for size in divisors(devices):
        legal += legal_expert_degrees(model, cluster, size)
    experts = expert_layer(model)
    rules = dict.fromkeys(ExpertDegrees._fields, NO_EXPERTS)
    if experts is not None:
        rules["ep"] = f"divide model.num_experts={experts.count} and the {devices} GPUs"
        rules["etp"] = f"divide the experts' width {experts.width} and the GPUs of a node"
    for key, rule in rules.items():
        pinned = space.pinned(key)
        members = sorted({getattr(own, key) for own in legal})
        if pinned is not None and not set(pinned) & set(members):
            raise refused_pin(key, pinned[0], rule, members)


def check_experts(
    name: str, strategy: LayerStrategy, model: Model, cluster: Cluster, size: int
) -> None:
    """Refuse expert degrees that Megatron-LM does not run on a stage of `size` GPUs.

    Errors:
        PlanError: names the layer, its degrees, the rule and the closest valid ones.
    """
    _check_degrees(name, strategy, model, cluster, size)
    if not model.has_experts:
        return
    if strategy.tp > 1 and not strategy.sequence_parallel:
        raise PlanError(
            f"plan: {name} has tp={strategy.tp} without sequence parallelism, which a model with "
            "experts needs; try sequence_parallel=true."
        )
    if strategy.shard_size:
        raise PlanError(
            f"plan: {name} has shard_size={strategy.shard_size}, which must be 0 in a model with "
            "experts; try 0."
        )


def _check_degrees(
    name: str, strategy: LayerStrategy, model: Model, cluster: Cluster, size: int
) -> None:
    legal = legal_expert_degrees(model, cluster, size)
    given = ExpertDegrees(strategy.ep, strategy.etp)
    if given in legal:
        return

    def distance(own: ExpertDegrees) -> int:
        return abs(own.etp - given.etp) + abs(own.ep - given.ep)

    near = min(legal, key=distance)
    rule = NO_EXPERTS
    experts = expert_layer(model)
    if experts is not None:
        rule = (
            f"divide the {experts.count} experts, their width {experts.width} and, as a product, "
            f"the {size} GPUs of a stage"
        )
    raise PlanError(
        f"plan: {name} has ep={given.ep} and etp={given.etp}, which must {rule}; try "
        f"ep={near.ep} and etp={near.etp}."
    )
