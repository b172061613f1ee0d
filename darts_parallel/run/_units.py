"""How data-parallel ranks keep the parameters of a layer: whole (ZeRO 0 and 1), or in parts (ZeRO 2 and 3).

Gradients are summed, not averaged: the loss is already divided by the tokens of the whole batch, so that
layers of different data-parallel degree agree. Both copies of a tied table get one gradient.

ZeRO 0 and 1 are written here, because `DistributedDataParallel` does not take tensor-parallel parameters,
`replicate` keeps a second copy of every parameter, and `ZeroRedundancyOptimizer` hands out whole tensors, so
that its ranks hold unequal bytes: none of them needs the bytes that ZeRO (Rajbhandari et al. 2020, arXiv
1910.02054) states. ZeRO 2 and 3 are PyTorch's `fully_shard` (Zhao et al. 2023, arXiv 2304.11277).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from darts_parallel.config import LOSSLESS, ModelConfig
from darts_parallel.cost import BLOCK, Tensors
from darts_parallel.errors import Entries
from darts_parallel.plans import LayerStrategy
from darts_parallel.run._experts import ExpertBank, expert_bank
from darts_parallel.run._layouts import local, redistributed
from darts_parallel.run._lossy import ErrorFeedback, padded
from darts_parallel.run._transformer import parameter_names

Modules = dict[str, nn.Module]
"""Modules by name."""
Named = dict[str, nn.Parameter]


def byte_size(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of what this rank holds of all of them."""
    return sum(local(t).numel() * t.element_size() for t in tensors)


class Unit(ABC):
    """The parameters of one layer (of two, where they share a table) and how they are kept.

    Attributes:
        parameters: By name; tensor-parallel ones are DTensors.
        slots: What the optimizer steps on this rank: plain tensors whose `.grad` is set by `reduce`.
    """

    def __init__(self, modules: Modules, mesh: DeviceMesh) -> None:
        self.parameters = own_parameters(modules)
        self.mesh = mesh
        self.slots: list[nn.Parameter] = []

    @abstractmethod
    def reduce(self) -> None:
        """Put the gradients of all data-parallel ranks on `slots`, after the last backward pass."""

    @abstractmethod
    def publish(self) -> None:
        """Put the new parameters on every rank that computes with them, after the optimizer step."""

    def full_gradient(self, name: str) -> Tensor:
        """Return the whole reduced gradient of a parameter, on every rank of the stage (collective)."""
        return whole(aligned(self.parameters[name]))

    def clear(self) -> None:
        """Forget all gradients."""
        for parameter in (*self.parameters.values(), *self.slots):
            parameter.grad = None

    def parameter_bytes(self) -> int:
        """Return the bytes of parameters that this rank computes with."""
        return byte_size(self.parameters.values())

    def _local_slots(self) -> list[nn.Parameter]:
        """Return what this rank holds of every parameter, as the optimizer steps it."""
        return [nn.Parameter(local(own.detach())) for own in self.parameters.values()]

    def extra_bytes(self) -> int:
        """Return the bytes of further copies of parameters."""
        return 0

    def gradient_bytes(self) -> int:
        """Return the bytes of gradients that this rank holds at the end of the backward passes."""
        gradients = [parameter.grad for parameter in self.parameters.values()]
        return byte_size([gradient for gradient in gradients if gradient is not None])

    def rounding_bytes(self) -> float:
        """Return by how many bytes of parameters uneven division may miss the mean over ranks."""
        return 0.0


def aligned(parameter: nn.Parameter) -> Tensor:
    """Return the gradient of a parameter, divided as the parameter is (a norm's may be a partial sum)."""
    gradient = parameter.grad
    if gradient is None:
        gradient = torch.zeros_like(parameter)
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
        gradient = gradient.redistribute(placements=parameter.placements)
    return gradient


def whole(tensor: Tensor) -> Tensor:
    """Return the tensor of all ranks (collective)."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Replicated(Unit):
    """ZeRO 0 and 1: every rank holds whole parameters and gradients; ZeRO 1 divides the optimizer.

    Gradients are reduced once an iteration, as one tensor a layer.
    """

    def __init__(self, strategy: LayerStrategy, modules: Modules, mesh: DeviceMesh) -> None:
        super().__init__(modules, mesh)
        axes = [mesh["shard"], mesh["replicate"]]
        self.groups = [axis.get_group() for axis in axes if axis.size() > 1]
        self.sharded = strategy.zero_stage == 1 and mesh["shard"].size() > 1
        lossy = strategy.grad_comm_bits < LOSSLESS and bool(self.groups)
        self.feedback = ErrorFeedback(strategy.grad_comm_bits, self.groups[0]) if lossy else None
        self._places = self._lay_out(BLOCK if lossy else 1)
        if self.sharded:
            self.slots = [nn.Parameter(self._own_parameters())]
            self._release()
        else:
            self.slots = self._local_slots()

    def _lay_out(self, block: int) -> dict[str, slice]:
        """Return the place of every parameter in the one tensor, and set that tensor's size.

        Divided ones come first, and no block of numbers holds both divided and whole ones: whole ones must be
        rounded alike on all tensor-parallel ranks, or their copies drift apart.

        Args:
            block: Numbers that are rounded together; 1 where nothing is.
        """
        sizes = {name: local(own).numel() for name, own in self.parameters.items()}
        divided = [name for name, own in self.parameters.items() if sizes[name] < own.numel()]
        whole = [name for name in self.parameters if name not in divided]
        places = {}
        end = 0
        for names in (divided, whole):
            end += -end % block
            for name in names:
                places[name] = slice(end, end + sizes[name])
                end += sizes[name]
        if self.feedback:
            self._size = padded(end, self.groups[0].size())
        else:
            shares = self.mesh["shard"].size() if self.sharded else 1
            self._size = -(-end // shares) * shares
        return places

    def reduce(self) -> None:
        """Reduce all gradients as one tensor at the strategy's bits, to all or (ZeRO 1) to their owners."""
        gradients = {}
        for name, parameter in self.parameters.items():
            parameter.grad = aligned(parameter)
            gradients[name] = local(parameter.grad)
        if not self.sharded:
            self._all_reduce(gradients)
            for slot, gradient in zip(self.slots, gradients.values(), strict=True):
                slot.grad = gradient
            return
        flat = self._flat(gradients)
        if self.feedback is not None:
            part = self.feedback.share(flat)
        else:
            part = redistributed(flat, self.mesh["shard"], Partial(), Shard(0))
            for group in self.groups[1:]:
                dist.all_reduce(part, group=group)
        # the optimizer's copy of the parameters lives only from here to `publish`
        self.slots[0].data = self._own_parameters()
        self.slots[0].grad = part

    def publish(self) -> None:
        """Gather what the ranks of ZeRO 1 have stepped."""
        if self.sharded:
            flat = self._gathered(self.slots[0].detach())
            with torch.no_grad():
                for name, parameter in self.parameters.items():
                    values = local(parameter)
                    values.copy_(flat[self._places[name]].view(values.shape))
            self._release()

    def full_gradient(self, name: str) -> Tensor:
        """Return the whole reduced gradient, as `Unit` says."""
        if not self.sharded:
            return super().full_gradient(name)
        parameter = self.parameters[name]
        assert self.slots[0].grad is not None
        flat = self._gathered(self.slots[0].grad)
        values = flat[self._places[name]].view(local(parameter).shape)
        if isinstance(parameter, DTensor):
            values = DTensor.from_local(
                values,
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
        return whole(values)

    def rounding_bytes(self) -> float:
        """Return the padding of the one tensor to equal parts, bytes."""
        share = 4.0 * (BLOCK if self.feedback is not None else 1)
        return share * self.mesh["shard"].size() if self.sharded else 0.0

    def overwrite(self, name: str, values: Tensor) -> None:
        """Put a gradient in the place of the reduced one."""
        if not self.sharded:
            local(aligned(self.parameters[name])).copy_(values)
            return
        part = self.slots[0].grad
        place = self._places[name]
        assert part is not None
        begin = self.mesh["shard"].get_local_rank() * part.numel()
        low = max(place.start, begin)
        high = min(place.stop, begin + part.numel())
        if low < high:
            mine = values.reshape(-1)[low - place.start : high - place.start]
            part[low - begin : high - begin] = mine

    def _all_reduce(self, gradients: Tensors) -> None:
        if not self.groups:
            return
        flat = self._flat(gradients)
        if self.feedback is not None:
            flat = self.feedback.everywhere(flat)
        else:
            for group in self.groups:
                dist.all_reduce(flat, group=group)
        for name, gradient in gradients.items():
            gradient.copy_(flat[self._places[name]].view(gradient.shape))

    def _flat(self, tensors: Tensors) -> Tensor:
        """Put what this rank holds of all parameters into one tensor, padding as 0."""
        flat = next(iter(tensors.values())).new_zeros(self._size)
        for name, tensor in tensors.items():
            flat[self._places[name]] = tensor.detach().reshape(-1)
        return flat

    def _own_parameters(self) -> Tensor:
        """Return a copy of this rank's part of the parameters."""
        parts = {name: local(parameter) for name, parameter in self.parameters.items()}
        return _part(self._flat(parts), self.mesh["shard"]).clone()

    def _gathered(self, part: Tensor) -> Tensor:
        return redistributed(part, self.mesh["shard"], Shard(0), Replicate())

    def _release(self) -> None:
        self.slots[0].data = self.slots[0].data.new_empty(0)
        self.slots[0].grad = None


class Sharded(Unit):
    """ZeRO 2 and 3 by `fully_shard`: gradients are reduce-scattered in every backward pass.

    ZeRO 3 frees the gathered parameters after each pass; ZeRO 2 keeps them for the iteration, next to
    the part that the optimizer steps.

    Args:
        modules: One layer by its name, or two that share a table and one `root` that holds both. The
            experts of a layer are left to a unit of their own.
    """

    def __init__(
        self,
        strategy: LayerStrategy,
        modules: Modules,
        mesh: DeviceMesh,
        dtype: torch.dtype,
        root: nn.Module | None = None,
    ) -> None:
        self.keeps = strategy.zero_stage == 2
        self.modules = modules
        data = mesh["shard"] if mesh["replicate"].size() == 1 else mesh["replicate", "shard"]
        policy = MixedPrecisionPolicy(None if dtype is torch.float32 else dtype, torch.float32)
        options: Entries = {"reshard_after_forward": not self.keeps, "mp_policy": policy}
        target = list(modules.values())
        fully_shard(target, mesh=data, ignored_params=_apart(target), **options)
        if root is not None:
            fully_shard(root, mesh=data)
        state = target[0]
        assert isinstance(state, FSDPModule)
        state.set_reshard_after_backward(not self.keeps, recurse=False)
        # gradients are summed, not averaged
        state.set_force_sum_reduction_for_comms(True)
        state.set_gradient_divide_factor(1.0)
        self.state = state
        super().__init__(modules, mesh)
        self.slots = self._local_slots()
        self._gathered_bytes = 0

    def reduce(self) -> None:
        """Free the gathered parameters of ZeRO 2; backward has reduced."""
        self._gathered_bytes = byte_size(own_parameters(self.modules).values())
        if self.keeps:
            self.state.reshard()
        for slot, parameter in zip(self.slots, self.parameters.values(), strict=True):
            slot.grad = local(aligned(parameter))

    def publish(self) -> None:
        """Do nothing: the next forward pass gathers."""

    def parameter_bytes(self) -> int:
        """Return the bytes of gathered parameters with ZeRO 2, of parts with ZeRO 3."""
        return self._gathered_bytes if self.keeps else super().parameter_bytes()

    def extra_bytes(self) -> int:
        """Return the bytes of the parts that lie next to the gathered parameters."""
        return super().parameter_bytes() if self.keeps else 0

    def rounding_bytes(self) -> float:
        """Return the bytes of uneven rows: a rank has at most one more than the mean, at worst none."""
        shards = self.mesh["shard"].size()
        total = 0.0
        for parameter in self.parameters.values():
            rows = parameter.shape[0]
            if isinstance(parameter, DTensor):
                names = parameter.device_mesh.mesh_dim_names or ()
                divided = "tp" in names and parameter.placements[names.index("tp")].is_shard(0)
                rows //= self.mesh["tp"].size() if divided else 1
            if rows % shards:
                width = parameter.numel() // parameter.shape[0]
                mean = rows / shards
                most = -(-rows // shards)
                total += 4.0 * width * max(most - mean, mean)
        return total


def own_parameters(modules: Modules) -> Named:
    """Return the parameters of modules by name, shared ones once, without the experts inside blocks."""
    seen = _apart(modules.values())
    found = {}
    for name, module in modules.items():
        for full, parameter in parameter_names(module, name):
            if parameter not in seen:
                seen.add(parameter)
                found[full] = parameter
    return found


def _apart(modules: Iterable[nn.Module]) -> set[nn.Parameter]:
    """Return the parameters of the experts inside modules that are no experts themselves."""
    found = set()
    for module in modules:
        bank = None if isinstance(module, ExpertBank) else expert_bank(module)
        if bank is not None:
            found |= set(bank.parameters())
    return found


TABLES = {"embedding": "embedding.table.weight", "head": "head.output.weight"}
"""Parameter of the vocabulary table by layer."""


class TiedTables:
    """Sums the gradients of the two copies once each is reduced, as Megatron-LM's embedding group does.

    Args:
        units: Units of this rank, by layer.
        group: This rank's partner in the other stage and itself; None where there is one stage.
    """

    def __init__(
        self, config: ModelConfig, units: dict[str, Unit], group: dist.ProcessGroup | None
    ) -> None:
        self.copies: list[tuple[Unit, str]] = []
        self.group = group
        self.vocab_size = config.vocab_size
        for name, table in TABLES.items():
            unit = units.get(name)
            if config.tie_embeddings and unit is not None and table in unit.parameters:
                self.copies.append((unit, table))
        if self.group is None and len(self.copies) < 2:
            self.copies = []  # one stage, one table

    def sum(self) -> None:
        """Gather whole gradients, sum them, and write this rank's part where the optimizer reads it."""
        if not self.copies:
            return
        wholes = [unit.full_gradient(table) for unit, table in self.copies]
        total = torch.stack([gradient[: self.vocab_size] for gradient in wholes]).sum(0)
        if self.group is not None:
            dist.all_reduce(total, group=self.group)
        for unit, table in self.copies:
            parameter = unit.parameters[table]
            missing = parameter.shape[0] - total.shape[0]
            rows = _part(torch.nn.functional.pad(total, (0, 0, 0, missing)), unit.mesh["tp"])
            if isinstance(unit, Replicated):
                unit.overwrite(table, rows)
                continue
            part = local(aligned(parameter))
            if part.numel():
                part.copy_(_part(rows, unit.mesh["shard"]))


def _part(rows: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return this rank's part of rows that the ranks of a mesh divide."""
    return rows.chunk(mesh.size())[mesh.get_local_rank()]
