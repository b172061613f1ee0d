"""Modules that a plan once computed wrongly, and modules that no plan can compute."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from darts_parallel.graph.verify import Made

WIDTH = 32


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


class Pair(nn.Module):
    """Two products around a function that a subclass overrides."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, 4 * WIDTH)
        self.b = nn.Linear(4 * WIDTH, WIDTH)

    def between(self, h: Tensor) -> Tensor:
        return torch.relu(h)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.between(self.a(x)))


class TimeShift(Pair):
    """Mix every token with the one before (RWKV)."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.ZeroPad2d((0, 0, 1, -1))
        self.mix = nn.Parameter(torch.full((1, 1, WIDTH), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.mix + self.shift(x) * (1 - self.mix))


class ComplexRotary(nn.Module):
    """Attention with the rotary embedding of Llama's own code."""

    def __init__(self) -> None:
        super().__init__()
        self.products = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        angles = torch.outer(torch.arange(16.0), torch.tensor([1.0, 0.1, 0.01, 0.001]))
        self.frequencies = torch.polar(torch.ones_like(angles), angles)

    def turned(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.reshape(*x.shape[:2], 4, 4, 2))
        turned = pairs * self.frequencies[None, : x.shape[1], None]
        return torch.view_as_real(turned).flatten(3).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, out = self.products
        values = v(x).unflatten(-1, (4, 8)).transpose(1, 2)
        y = functional.scaled_dot_product_attention(
            self.turned(q(x)), self.turned(k(x)), values, is_causal=True
        )
        return out(y.transpose(1, 2).flatten(2))


class ToTruth(Pair):
    def forward(self, x: Tensor) -> Tensor:
        return (super().forward(x) - 0.1).to(torch.bool)


class ToWhole(Pair):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * (y * 10).to(torch.int8)


class AnotherType(Pair):
    def between(self, h: Tensor) -> Tensor:
        return h * (h.detach().view(torch.int32) % 3).float()


class Squeezed(Pair):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.squeeze())


class Unbatched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(8, 16, 3, padding=1)
        self.pool = nn.MaxPool2d(3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(torch.relu(self.convolution(x)))


class WithLoss(Pair):
    """Return the hidden state and an auxiliary loss."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        y = super().forward(x)
        return y, y.pow(2).mean()


class Counting(Pair):
    """Keep a running mean of the input in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.add_(x.detach().mean((0, 1)))
        return super().forward(x + self.mean)


class Frozen(Pair):
    """Train a factor of low rank next to frozen weights."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.down = nn.Linear(WIDTH, 4, bias=False)
        self.up = nn.Linear(4, 4 * WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(x) + self.up(self.down(x))))


class Masked(Pair):
    """Read a mask from a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.mask = torch.tril(torch.ones(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.mask @ x)


class Untrained(Pair):
    """Compute a gate without gradient."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            gate = self.a(x).sigmoid()
        return self.b(self.a(x) * gate)


class Named(Pair):
    """Inputs with the names of functions of the file."""

    def forward(self, edges: Tensor) -> Tensor:  # type: ignore[override]
        mesh = super().forward(edges)
        return mesh + edges


class Composed(nn.Module):
    """Operators without a rule, which torch writes as others that have one."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.zeros_like(x[:, 0])
        for k in range(3):
            y = self.cell(x[:, k], y)
        return torch.outer(y.sum(0), y.mean(1)).type_as(x)


class AskingForTheDevice(Pair):
    """Count in whole numbers where the device can: the processor counts floating ones alone."""

    def between(self, h: Tensor) -> Tensor:
        places = h.argmax(-1)
        counted = places.float() if h.device.type == "cpu" else places.int()
        return h * torch.histc(counted, 4, 0, 4 * WIDTH).sum()


def asking() -> nn.Module:
    return AskingForTheDevice()


class Constant(Pair):
    """A constant of the code on the device of the input."""

    def between(self, h: Tensor) -> Tensor:
        return torch.maximum(h, torch.tensor([0.25, -0.25], device=h.device).repeat(2 * WIDTH))


def constant() -> nn.Module:
    return Constant()


class Listed(Pair):
    """Lists of indices, which torch makes to tensors where nothing sees it (Falcon)."""

    def between(self, h: Tensor) -> Tensor:
        h = h[..., [1, 0] * (2 * WIDTH)].clone()
        h[:, [0, 2]] = h[:, [3, 1]] * 2
        return h[[1, 0]]


def listed() -> nn.Module:
    return Listed()


class Remembering(Pair):
    """Keep what was computed, as RecurrentGemma keeps its states."""

    kept: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.kept = []

    def between(self, h: Tensor) -> Tensor:
        self.kept = [h.relu()]
        return self.kept[0]


def remembering() -> nn.Module:
    return Remembering()


class Nested(Pair):
    """Lists in a list of indices, whose numbers the meta device loses."""

    def between(self, h: Tensor) -> Tensor:
        return h[:, [[0, 1], [2, 3]]].sum(1)


class Dropping(Pair):
    def between(self, h: Tensor) -> Tensor:
        return functional.dropout(h, 0.5)


class Noisy(Pair):
    def between(self, h: Tensor) -> Tensor:
        return h + torch.randn_like(h)


class DroppingAttention(Pair):
    def between(self, h: Tensor) -> Tensor:
        heads = h.unflatten(-1, (4, -1)).transpose(1, 2)
        y = functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.1)
        return y.transpose(1, 2).flatten(2)


class Choosing(Pair):
    def between(self, h: Tensor) -> Tensor:
        return torch.cond(h.sum() > 0, torch.relu, torch.sigmoid, (h,))


class Assigning(Pair):
    def between(self, h: Tensor) -> Tensor:
        h = h.clone()
        h[:, 0] = 0
        h[:, 2:8] = h[:, 8:14]
        return h


class Silent(Pair):
    def forward(self, x: Tensor) -> None:  # type: ignore[override]
        super().forward(x)


class Doubling(Pair):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(2.0))


class Empty(Pair):
    def between(self, h: Tensor) -> Tensor:
        return h[:, :0].sum(1, keepdim=True) + h


class Exiting(Pair):
    def forward(self, x: Tensor) -> Tensor:
        raise SystemExit(7)


SHAPES = {Squeezed: (4, 1, WIDTH), Unbatched: (8, 16, 16)}
COMPUTED = (
    TimeShift,
    ComplexRotary,
    ToTruth,
    ToWhole,
    AnotherType,
    Squeezed,
    Unbatched,
    WithLoss,
    Counting,
    Frozen,
    Masked,
    Untrained,
    Named,
    Composed,
    Assigning,
    nn.Identity,
)
REFUSED = {
    Dropping: "dropout .* draws random numbers",
    Noisy: "randn_like .* draws random numbers",
    DroppingAttention: "attention .* draws random numbers",
    Choosing: "cond .* chooses between functions",
    Silent: "it returns no tensor",
    Doubling: "changes its input x in place",
    Empty: "makes an empty tensor",
    Exiting: "SystemExit",
}
"""Words of the sentence that refuses each module."""


def made(kind: type[nn.Module]) -> Made:
    """Return a module with its inputs."""
    torch.manual_seed(0)
    return kind(), [drawn(*SHAPES.get(kind, (2, 16, WIDTH)))]


def exiting() -> nn.Module:
    raise SystemExit(0)


def pair() -> nn.Module:
    return Pair()


def convolution() -> nn.Module:
    return Unbatched()


def masked() -> nn.Module:
    return Masked()


def stack() -> nn.Module:
    """Four narrow blocks, which tensor parallelism makes no faster."""
    blocks = (nn.TransformerEncoderLayer(WIDTH, 4, 64, batch_first=True) for _ in range(4))
    return nn.Sequential(*blocks)


class ScaledToZero(Pair):
    """A branch behind a scale that begins at zero; tokens that a mask takes out are no numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        return (super().forward(x) * self.scale).masked_fill(mask[..., None], float("nan"))


def scaled_to_zero() -> nn.Module:
    return ScaledToZero()
