"""Part "table": the networks for tables, against an MLP of the same width, and against the CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from statistics import median

import torch
from torch import nn
from torch.nn import functional

from check.part import Part, Value
from check.timing import compare, peak_mib, ratio
from check.workloads import torch_adamw
from ringspark.estimators.training.objective.losses import resolve_loss
from ringspark.models import ModelSpec
from ringspark.models.tabpack import TabPack

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
        numbers, ids, labels = _rows(rows)
        difference = self._compare_with_cpu(name, numbers, ids, labels)
        device = self.setup.device
        own, plain = _network(name, self.setup.is_tiny).to(device), _mlp(self.setup.is_tiny).to(device)
        on_device = [tensor.to(device) for tensor in (numbers, ids)]
        own_step = _step(own, on_device, labels.to(device), "cross_entropy_per_member")
        known = torch.nan_to_num(on_device[0])
        plain_step = _step(plain, [known], labels.to(device), "cross_entropy")
        peak = peak_mib(own_step, self.setup)
        rounds = compare({"own": own_step, "plain": plain_step}, self.setup)
        rates = {key: median(rows / seconds for seconds in values) for key, values in rounds.items()}
        return [
            *(rates["own"], rates["plain"]),
            *(ratio(rounds["plain"], rounds["own"]), peak, difference),
        ]

    def _compare_with_cpu(
        self, name: str, numbers: torch.Tensor, ids: torch.Tensor, labels: torch.Tensor
    ) -> float:
        first = _network(name, self.setup.is_tiny).eval()
        second = copy.deepcopy(first).to(self.setup.device)
        found = []
        for net, device in ((first, "cpu"), (second, self.setup.device)):
            inputs = (numbers.to(device), ids.to(device))
            if isinstance(net, TabPack):
                targets = functional.one_hot(labels, _CLASSES).double().to(device)
                errors = net.candidates(*inputs).double() - targets
                net.choose_members(torch.einsum("cbo,dbo->cd", errors, errors))
            with torch.no_grad():
                found.append(net(*inputs).softmax(1).cpu())
        difference = float((found[0] - found[1]).abs().max())
        assert difference < 1e-3, f"a probability differs by {difference:.2g} from the CPU's"
        return difference


def _network(name: str, is_tiny: bool) -> nn.Module:
    torch.manual_seed(0)
    edges = torch.linspace(-2, 2, 5 if is_tiny else 49).tolist()
    shape = {"edges": [edges] * _NUMBERS, "cardinalities": _CATEGORIES, "out_features": _CLASSES}
    module: nn.Module = ModelSpec(
        name, {**shape, "averages": "probabilities", "width": 16 if is_tiny else _UNITS}
    ).build()
    return module


def _mlp(is_tiny: bool) -> nn.Module:
    hidden = [16 if is_tiny else _UNITS] * 2
    module: nn.Module = ModelSpec(
        "mlp", {"in_features": _NUMBERS, "hidden": hidden, "out_features": _CLASSES}
    ).build()
    return module


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
        rows_loss(net(*inputs), labels).mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return call
