"""ZeRO 0 and 1: whole parameters and gradients on every data-parallel rank.

Gradients are reduced once an iteration, as one tensor a layer. This is done here, because
`DistributedDataParallel` does not take tensor-parallel parameters, `replicate` keeps a second copy of
every parameter, and `ZeroRedundancyOptimizer` hands out whole tensors, so that its ranks hold unequal
bytes: none of them needs the bytes that ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054) states.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from darts_parallel.cost.collectives import BLOCK, LOSSLESS
from darts_parallel.plan.strategy import LayerStrategy
from darts_parallel.run.lossy import ErrorFeedback, padded
from darts_parallel.run.units import Named, Unit, aligned, local, whole


class Replicated(Unit):
    """ZeRO 0 and 1: every rank holds whole parameters and gradients; ZeRO 1 divides the optimizer."""

    def __init__(self, strategy: LayerStrategy, parameters: Named, mesh: DeviceMesh) -> None:
        super().__init__(strategy, parameters, mesh)
        self.groups = [mesh[name].get_group() for name in ("shard", "replicate") if mesh[name].size() > 1]
        self.sharded = strategy.zero_stage == 1 and mesh["shard"].size() > 1
        lossy = strategy.grad_comm_bits < LOSSLESS and bool(self.groups)
        self.feedback = ErrorFeedback(strategy.grad_comm_bits, self.groups[0]) if lossy else None
        self._gap = self._divided_first() if lossy else 0
        if self.sharded:
            self.slots = [nn.Parameter(self._own(self._flat_parameters()).clone())]
            self._release()
        else:
            self.slots = [nn.Parameter(local(p.detach())) for p in self.parameters.values()]

    def _divided_first(self) -> int:
        """Order parameters so that no block of numbers holds both divided and whole ones.

        Whole ones must be rounded alike on all tensor-parallel ranks, or their copies drift apart.

        Returns:
            Zeros to send between the two.
        """
        divided = {
            name: p for name, p in self.parameters.items()
            if isinstance(p, DTensor) and any(placed.is_shard() for placed in p.placements)
        }  # fmt: skip
        self.parameters = divided | self.parameters
        return -sum(local(p).numel() for p in divided.values()) % BLOCK

    def reduce(self) -> None:
        """ZeRO 0 all-reduces, ZeRO 1 reduce-scatters all gradients as one tensor, at the strategy's bits."""
        gradients = [aligned(parameter) for parameter in self.parameters.values()]
        for parameter, gradient in zip(self.parameters.values(), gradients, strict=True):
            parameter.grad = gradient
        if not self.sharded:
            self._everywhere([local(gradient) for gradient in gradients], self.groups)
            for slot, gradient in zip(self.slots, gradients, strict=True):
                slot.grad = local(gradient)
            return
        flat = self._flat([local(gradient) for gradient in gradients])
        if self.feedback is not None:
            part = self.feedback.share(flat)
        else:
            part = torch.empty_like(self._own(flat))
            dist.reduce_scatter_single(part, flat, group=self.groups[0])
            for group in self.groups[1:]:
                dist.all_reduce(part, group=group)
        # the optimizer's copy of the parameters lives only from here to `publish`
        self.slots[0].data = self._own(self._flat_parameters()).clone()
        self.slots[0].grad = part

    def publish(self) -> None:
        """ZeRO 1 gathers what the ranks have stepped."""
        if not self.sharded:
            return
        flat = torch.empty(self._padded(), device=self.slots[0].device)
        dist.all_gather_single(flat, self.slots[0].detach(), group=self.groups[0])
        with torch.no_grad():
            for parameter, values in zip(self.parameters.values(), self._views(flat), strict=True):
                local(parameter).copy_(values)
        self._release()

    def full_gradient(self, name: str) -> Tensor:
        """As in `Unit`."""
        parameter = self.parameters[name]
        if not self.sharded:
            return whole(aligned(parameter))
        part = self.slots[0].grad
        assert part is not None
        flat = torch.empty(self._padded(), device=part.device)
        dist.all_gather_single(flat, part, group=self.groups[0])
        values = self._views(flat)[list(self.parameters).index(name)]
        if isinstance(parameter, DTensor):
            values = DTensor.from_local(
                values, parameter.device_mesh, parameter.placements,
                run_check=False, shape=parameter.shape, stride=parameter.stride(),
            )  # fmt: skip
        return whole(values)

    def rounding_bytes(self) -> float:
        """The one tensor is padded to equal parts."""
        share = 4.0 * (BLOCK if self.feedback is not None else 1)
        return share * self.mesh["shard"].size() if self.sharded else 0.0

    def overwrite(self, name: str, values: Tensor) -> None:
        """Put a gradient in the place of the reduced one.

        Args:
            name: Of a parameter.
            values: What this tensor-parallel rank holds of it.
        """
        if not self.sharded:
            local(aligned(self.parameters[name])).copy_(values)
            return
        names, sizes = list(self.parameters), [local(p).numel() for p in self.parameters.values()]
        first = sum(sizes[: names.index(name)])
        part = self.slots[0].grad
        assert part is not None
        begin = self.mesh["shard"].get_local_rank() * part.numel()
        low, high = max(first, begin), min(first + values.numel(), begin + part.numel())
        if low < high:
            part[low - begin : high - begin] = values.reshape(-1)[low - first : high - first]

    def _everywhere(self, gradients: list[Tensor], groups: list[dist.ProcessGroup]) -> None:
        if not groups:
            return
        flat = self._flat(gradients)
        if self.feedback is not None:
            flat = self.feedback.everywhere(flat)
        else:
            for group in groups:
                dist.all_reduce(flat, group=group)
        for gradient, values in zip(gradients, self._views(flat), strict=True):
            gradient.copy_(values)

    def _padded(self) -> int:
        count = sum(local(p).numel() for p in self.parameters.values())
        if self.feedback is not None:
            return padded(count + self._gap, self.feedback.group.size())
        shards = self.mesh["shard"].size() if self.sharded else 1
        return -(-count // shards) * shards

    def _flat(self, tensors: list[Tensor]) -> Tensor:
        pieces = [tensor.detach().reshape(-1) for tensor in tensors]
        if self._gap:
            pieces.insert(self._num_divided(), pieces[0].new_zeros(self._gap))
        flat = torch.cat(pieces)
        return nn.functional.pad(flat, (0, self._padded() - flat.numel()))

    def _flat_parameters(self) -> Tensor:
        return self._flat([local(parameter) for parameter in self.parameters.values()])

    def _own(self, flat: Tensor) -> Tensor:
        return flat.chunk(self.mesh["shard"].size())[self.mesh["shard"].get_local_rank()]

    def _views(self, flat: Tensor) -> list[Tensor]:
        places = [local(parameter) for parameter in self.parameters.values()]
        sizes = [place.numel() for place in places]
        if self._gap:
            sizes.insert(self._num_divided(), self._gap)
        pieces = list(torch.split(flat[: sum(sizes)], sizes))
        if self._gap:
            del pieces[self._num_divided()]
        return [piece.view(place.shape) for piece, place in zip(pieces, places, strict=True)]

    def _num_divided(self) -> int:
        return sum(local(p).numel() < p.numel() for p in self.parameters.values())

    def _release(self) -> None:
        self.slots[0].data = self.slots[0].data.new_empty(0)
        self.slots[0].grad = None
