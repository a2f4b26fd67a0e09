"""Part "optimizers": one step of each optimizer against torch's fused AdamW, and the bytes of its state."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from check.part import Part, Value
from check.timing import compare
from check.workloads import torch_adamw, workload
from ringspark.estimators.training.optimizers.registry import OPTIMIZERS, make_optimizer

# Between two 8-bit codes, devices may round differently; one code is 1 % of a step of 0.01.
_TOLERANCE, _TOLERANCE_8BIT = 1e-4, 2e-3


class Optimizers(Part):
    columns = (
        *("ms per step", "torch's AdamW", "time ratio", "state bytes per weight"),
        "difference from the CPU",
    )
    note = (
        "`optimizer.step()` alone, over the transformer's weights. The last column is the largest difference "
        "of a weight between 5 steps on the device and on the CPU, at a learning rate of 0.01."
    )

    def cases(self) -> Sequence[str]:
        first = [name for name in OPTIMIZERS if "8bit" in name]
        return [*first, *(name for name in OPTIMIZERS if name not in first)]

    def measure(self, case: str) -> Sequence[Value]:
        pairs = zip(_train(case, self.setup.device), _train(case, "cpu"), strict=True)
        difference = max(float((found - wanted).abs().max()) for found, wanted in pairs)
        limit = _TOLERANCE_8BIT if "8bit" in case else _TOLERANCE
        assert difference <= limit, f"a weight differs by {difference:.2g} from the CPU's"
        own, plain = (self._parameters() for _ in range(2))
        optimizer = make_optimizer(case, own, 1e-4, 0.01)
        rounds = compare({"own": optimizer.step, "torch": torch_adamw(plain).step}, self.setup)
        leaves = tree_leaves([dict(state) for state in optimizer.state.values()])
        held = sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))
        return [
            *(*rounds.milliseconds("own", "torch"), rounds.ratio("own", "torch")),
            *(held / sum(p.numel() for p in own), difference),
        ]

    def _parameters(self) -> list[nn.Parameter]:
        """Returns weights with gradients."""
        made = list(workload("transformer", self.setup).build(self.setup.device).parameters())
        for parameter in made:
            parameter.grad = torch.randn_like(parameter) * 0.01
        return made


def _train(name: str, device: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 4)).to(device)
    optimizer = make_optimizer(name, net.parameters(), 0.01, 0.1)
    generator = torch.Generator().manual_seed(2)
    for _ in range(5):
        rows = torch.randn(64, 64, generator=generator).to(device)
        optimizer.zero_grad()
        (net(rows) - rows[:, :4]).square().mean().backward()
        optimizer.step()
    return [p.detach().cpu() for p in net.parameters()]
