"""Part "table": the networks for tables, against an MLP of the same width, and against the CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from peak_memory import peak_bytes
from torch import nn
from torch.nn import functional

from check.part import Part, Value
from check.timing import MIB, compare
from check.workloads import torch_adamw
from ringspark.estimators.training.objective.losses import resolve_loss
from ringspark.extras.tables.tabpack import TabPack
from ringspark.models import ModelSpec

_CLASSES, _UNITS = 3, 256
_NUMBERS, _CATEGORIES = 20, (1000, 50, 12, 4)


class Table(Part):
    columns = ("rows/s", "MLP", "ratio", "peak MiB", "difference from the CPU")
    note = (
        f"A step with {_NUMBERS} numbers and {len(_CATEGORIES)} categories, cross entropy per member and "
        "AdamW. The MLP has the same width and depth and takes the numbers alone. The difference is the "
        "largest of a class probability in evaluation, for TabPack after each device chose its members."
    )

    def cases(self) -> Sequence[str]:
        return [f"{name}, {rows} rows" for name in ("tabpack", "tabm") for rows in (256, 1024)]

    def measure(self, case: str) -> Sequence[Value]:
        name, count = case.split(", ")
        rows = 8 if self.setup.is_tiny else int(count.split()[0])
        net, batch = self._network(name), _rows(rows)
        difference = _compare_with_cpu(net, batch, self.setup.device)
        numbers, ids, labels = (tensor.to(self.setup.device) for tensor in batch)
        own = _step(net.to(self.setup.device), [numbers, ids], labels, "cross_entropy_per_member")
        mlp = self._mlp().to(self.setup.device)
        plain = _step(mlp, [torch.nan_to_num(numbers)], labels, "cross_entropy")
        peak = peak_bytes(own, self.setup.device) / MIB
        rounds = compare({"own": own, "plain": plain}, self.setup)
        rates = [rounds.rate(key, rows) for key in ("own", "plain")]
        return [*rates, rounds.ratio("plain", "own"), peak, difference]

    def _network(self, name: str) -> nn.Module:
        edges = torch.linspace(-2, 2, 5 if self.setup.is_tiny else 49).tolist()
        shape = {"edges": [edges] * _NUMBERS, "cardinalities": _CATEGORIES, "averages": "probabilities"}
        return self._build(name, width=self._units, **shape)

    def _mlp(self) -> nn.Module:
        return self._build("mlp", in_features=_NUMBERS, hidden=[self._units] * 2)

    def _build(self, name: str, **shape: Any) -> nn.Module:
        torch.manual_seed(0)
        return ModelSpec(name, {**shape, "out_features": _CLASSES}).build()

    @property
    def _units(self) -> int:
        return 16 if self.setup.is_tiny else _UNITS


def _compare_with_cpu(net: nn.Module, batch: Sequence[torch.Tensor], device: str) -> float:
    found = [_probabilities(copy.deepcopy(net).to(where).eval(), batch, where) for where in ("cpu", device)]
    difference = float((found[0] - found[1]).abs().max())
    assert difference < 1e-3, f"a probability differs by {difference:.2g} from the CPU's"
    return difference


def _probabilities(net: nn.Module, batch: Sequence[torch.Tensor], device: str) -> torch.Tensor:
    *inputs, labels = (tensor.to(device) for tensor in batch)
    if isinstance(net, TabPack):
        errors = net.candidates(*inputs).double() - functional.one_hot(labels, _CLASSES).double()
        net.choose_members(torch.einsum("cbo,dbo->cd", errors, errors))
    with torch.no_grad():
        return net(*inputs).softmax(1).cpu()


def _rows(rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    numbers = torch.randn(rows, _NUMBERS, generator=generator)
    numbers[torch.rand(numbers.shape, generator=generator) < 0.05] = torch.nan  # missing values
    ids = [torch.randint(count, (rows,), generator=generator) for count in _CATEGORIES]
    return numbers, torch.stack(ids, 1), torch.randint(_CLASSES, (rows,), generator=generator)


def _step(
    net: nn.Module, inputs: Sequence[torch.Tensor], labels: torch.Tensor, loss: str
) -> Callable[[], None]:
    optimizer, rows_loss = torch_adamw(list(net.parameters())), resolve_loss(loss, labels.device)
    net.train()

    def call() -> None:
        optimizer.zero_grad()
        rows_loss(net(*inputs), labels).mean().backward()
        optimizer.step()

    return call
