"""Networks with all types of saved tensors, one training pass, and a counter of live bytes."""

import contextlib
import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ringspark.extras.activations.hooks import saved_tensor_hooks


class LiveBytes(TorchDispatchMode):
    """Tracks every storage that operations create, and which of them are still alive."""

    def __init__(self, *known: torch.Tensor) -> None:
        super().__init__()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self._known = {t.untyped_storage()._cdata for t in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._known:
                    self._storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return result

    def total(self) -> int:
        return sum(size for reference, size in self._storages.values() if not reference.expired())


@dataclass
class Pass:
    """Results of a forward and backward pass, and the bytes held between them and afterwards."""

    output: torch.Tensor
    gradients: list[torch.Tensor]
    held: int
    left: int

    def equals(self, other: Any) -> bool:
        mine, theirs = [self.output, *self.gradients], [other.output, *other.gradients]
        return all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))

    def error(self, other: Any) -> float:
        """Norm of the gradient difference, relative to the other norm."""
        mine, theirs = (torch.cat([g.flatten() for g in p.gradients]) for p in (self, other))
        return float((mine - theirs).norm() / theirs.norm())


class Block(nn.Module):
    """A transformer block; its query, key and value are views of one storage."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(dim), nn.LayerNorm(dim)])
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * dim, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq, dim = x.shape
        parts = self.qkv(self.norms[0](x)).chunk(3, -1)
        q, k, v = (part.view(batch, seq, self.heads, -1).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.dropout(self.out(mixed.transpose(1, 2).reshape(batch, seq, dim)), 0.1, self.training)
        return x + self.mlp(self.norms[1](x))


def mlp() -> nn.Module:
    return nn.Sequential(
        *(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.3)),
        *(nn.Linear(256, 256), nn.ReLU(inplace=True)),
        *(nn.Linear(256, 256), nn.Dropout(0.1, inplace=True)),
        nn.Linear(256, 10),
    )


def convnet() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)),
    )


def transformer() -> nn.Module:
    return nn.Sequential(*(Block(64, 4) for _ in range(3)), nn.Flatten(), nn.Linear(64 * 32, 10))


def encoder() -> nn.Module:
    """Encoder layers of torch, which compute attention in one fused call."""
    layers = [
        nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, activation=a) for a in ("relu", "gelu")
    ]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 32, 10))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (128, 64)),
    "convnet": (convnet, (16, 3, 16, 16)),
    "transformer": (transformer, (8, 32, 64)),
    "encoder": (encoder, (8, 32, 64)),
}

Run = Callable[..., Pass]


@pytest.fixture(scope="module")
def run() -> Run:
    """Returns a function that runs a pass over a network of `NETWORKS`, always with the same numbers."""
    plain: dict[tuple[object, ...], Pass] = {}

    def run(name: str, **settings: Any) -> Pass:
        if not {"dtype", "channels_last"} >= settings.keys():
            return one_pass(name, **settings)
        key = (name, settings.get("dtype"), settings.get("channels_last", False))
        if key not in plain:
            plain[key] = one_pass(name, **settings)
        return plain[key]

    def one_pass(
        name: str,
        *,
        offload: str = "none",
        compression: str = "none",
        dtype: torch.dtype | None = None,
        change: Callable[[nn.Module], object] = lambda net: None,
        channels_last: bool = False,
        device: str = "cpu",
    ) -> Pass:
        make, shape = NETWORKS[name]
        torch.manual_seed(0)
        net, x = make(), torch.randn(shape)
        if channels_last:
            x = x.to(memory_format=torch.channels_last)
        change(net)
        net, x = net.to(device), x.to(device)
        state = [*net.parameters(), *net.buffers()]
        autocast = torch.autocast(device, dtype) if dtype else contextlib.nullcontext()
        hooks = saved_tensor_hooks(offload=offload, compression=compression, module=net, device=x.device)
        with LiveBytes(x, *state) as live:
            with autocast, hooks:
                output = net(x)
            held = live.total()
            output.float().square().mean().backward()
            result = Pass(output.detach().clone(), [p.grad.clone() for p in net.parameters()], held, 0)
            net.zero_grad()
            del output
            gc.collect()
            result.left = live.total() - sum(t.nbytes for t in [result.output, *result.gradients])
        return result

    return run


@pytest.fixture
def live_bytes() -> type[LiveBytes]:
    return LiveBytes


@pytest.fixture(params=NETWORKS)
def network(request: pytest.FixtureRequest) -> str:
    return str(request.param)
