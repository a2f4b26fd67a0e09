"""Networks are recorded from several threads, and recorded networks are quantized like the networks."""

from __future__ import annotations

import logging
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch._dynamo  # torch 2.6 imports it at the first export, and its import adds filters
from small_networks import Net
from torch import nn

from ringspark.estimators.inference.precision import reduce_precision
from ringspark.extras.export.recording import record_program
from ringspark.models.process_state import ignore_warnings


class Noisy(nn.Module):
    """Warns, logs and prints during a trace; changes a buffer, so that torch decomposes the trace."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        warnings.warn("while it runs", UserWarning, stacklevel=2)
        result: torch.Tensor = self.layers(inputs)
        return result


def state() -> tuple[Any, ...]:
    ignored = [entry for entry in warnings.filters if entry[0] == "ignore"]
    return sys.stderr, logging.root.manager.disable, ignored


def test_networks_are_recorded_from_several_threads() -> None:
    before, nets = state(), [Noisy().eval() for _ in range(3)]
    start = threading.Barrier(len(nets))

    def record(net: nn.Module) -> torch.Tensor:
        start.wait()
        program = record_program(
            net, lambda rows: (torch.zeros(rows, 3),), [{0: torch.export.Dim("batch", min=1)}]
        )
        return program(torch.ones(4, 3))

    with ignore_warnings(), ThreadPoolExecutor(len(nets)) as pool:
        found = list(pool.map(record, nets))
        expected = [net(torch.ones(4, 3)) for net in nets]
    assert all(torch.allclose(*pair) for pair in zip(found, expected, strict=True))
    assert state() == before


def test_a_recorded_program_quantizes_the_same_layers() -> None:
    layers = {"first": nn.Linear(2, 64), "last": nn.Linear(64, 1)}
    module = Net(lambda self, x: self.last(torch.tanh(self.first(x))), **layers).eval()
    x = torch.randn(500, 2)
    program = record_program(
        module, lambda rows, length=None: (torch.zeros(rows, 2),), [{0: torch.export.Dim("batch", min=1)}], []
    )
    program.load_state_dict(module.state_dict(), assign=True)
    for precision in ("bf16", "int8"):
        outputs = [reduce_precision(each, precision)(x) for each in (module, program)]
        assert torch.equal(*outputs)
        assert not torch.equal(outputs[0].float(), module(x))
