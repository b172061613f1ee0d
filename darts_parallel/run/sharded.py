"""ZeRO 2 and 3 by PyTorch's `fully_shard` (Zhao et al. 2023, arXiv 2304.11277)."""

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from darts_parallel.plan.strategy import LayerStrategy
from darts_parallel.run.mixture.experts import ExpertBank, expert_bank
from darts_parallel.run.transformer import parameter_names
from darts_parallel.run.units import Unit, aligned, byte_size, local, whole


def _apart(modules: list[nn.Module]) -> set[nn.Parameter]:
    """Parameters of the experts inside modules that are no experts themselves."""
    inside = [expert_bank(module) for module in modules if not isinstance(module, ExpertBank)]
    return {parameter for bank in inside if bank is not None for parameter in bank.parameters()}


class Sharded(Unit):
    """ZeRO 2 and 3 by `fully_shard`: gradients are reduce-scattered in every backward pass.

    ZeRO 3 frees the gathered parameters after each pass; ZeRO 2 keeps them for the iteration, beside
    the part that the optimizer steps.

    Args:
        modules: One layer, or two that share a table and one `root` that holds both; a layer's experts
            are left to a unit of their own.
    """

    def __init__(
        self, strategy: LayerStrategy, modules: list[nn.Module], names: list[str], mesh: DeviceMesh,
        root: nn.Module | None = None,
    ) -> None:  # fmt: skip
        self.keeps = strategy.zero_stage == 2
        data = mesh["shard"] if mesh["replicate"].size() == 1 else mesh["replicate", "shard"]
        target = modules[0] if len(modules) == 1 else modules
        apart = _apart(modules)
        fully_shard(target, mesh=data, reshard_after_forward=not self.keeps, ignored_params=apart)
        if root is not None:
            fully_shard(root, mesh=data)
        self.modules, state = modules, modules[0]
        assert isinstance(state, FSDPModule)
        self.state = state
        state.set_reshard_after_backward(not self.keeps, recurse=False)
        state.set_force_sum_reduction_for_comms(True)
        state.set_gradient_divide_factor(1.0)
        super().__init__(strategy, {}, mesh)
        seen = {id(parameter) for parameter in apart}
        for module, name in zip(modules, names, strict=True):
            for full, parameter in parameter_names(module, name):
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    self.parameters[full] = parameter
        self.slots = [nn.Parameter(local(p.detach())) for p in self.parameters.values()]
        self._gathered_bytes = 0

    def reduce(self) -> None:
        """Backward has reduced; ZeRO 2 frees the gathered parameters."""
        apart = {id(p) for p in _apart(self.modules)}
        now = {id(p): p for module in self.modules for p in module.parameters() if id(p) not in apart}
        self._gathered_bytes = byte_size(list(now.values()))
        if self.keeps:
            self.state.reshard()
        for slot, parameter in zip(self.slots, self.parameters.values(), strict=True):
            slot.grad = local(aligned(parameter))

    def publish(self) -> None:
        """Nothing: the next forward pass gathers."""

    def full_gradient(self, name: str) -> Tensor:
        """As in `Unit`."""
        return whole(aligned(self.parameters[name]))

    def parameter_bytes(self) -> int:
        """Gathered ones with ZeRO 2, parts with ZeRO 3."""
        return self._gathered_bytes if self.keeps else super().parameter_bytes()

    def extra_bytes(self) -> int:
        """The parts that lie beside the gathered parameters."""
        return super().parameter_bytes() if self.keeps else 0

    def rounding_bytes(self) -> float:
        """A rank has whole rows: at most one more than the mean, at worst none."""
        shards, total = self.mesh["shard"].size(), 0.0
        for parameter in self.parameters.values():
            rows = parameter.shape[0]
            if isinstance(parameter, DTensor):
                rows //= self._tensor_shards(parameter)
            if rows % shards:
                width = parameter.numel() // parameter.shape[0]
                total += 4.0 * width * max(-(-rows // shards) - rows / shards, rows / shards)
        return total

    def _tensor_shards(self, parameter: DTensor) -> int:
        divides_rows = "tp" in (parameter.device_mesh.mesh_dim_names or ())
        if not divides_rows:
            return 1
        index = (parameter.device_mesh.mesh_dim_names or ()).index("tp")
        return self.mesh["tp"].size() if parameter.placements[index].is_shard(0) else 1
