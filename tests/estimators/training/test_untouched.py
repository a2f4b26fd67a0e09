"""The checks of the driver leave the user's network, and all that it holds, as they were."""

import copy
import random
from collections import OrderedDict, deque
from typing import Any

import numpy as np
import torch
from small_training import Runs
from torch import nn

from ringspark.estimators.training.settings.config import UserObjects


class Box:
    def __init__(self) -> None:
        self.rows: list[list[float]] = [[]]


class Newest(OrderedDict[str, int]):
    """A cache of limited size, which does not survive `OrderedDict.copy`."""

    def __init__(self, size: int = 2) -> None:
        super().__init__()
        self.size = size

    def __getitem__(self, key: str) -> int:
        self.move_to_end(key)
        return super().__getitem__(key)

    def __setitem__(self, key: str, value: int) -> None:
        super().__setitem__(key, value)
        if len(self) > self.size:
            self.popitem(last=False)


class Remembers(nn.Module):
    """Changes everything that it holds in each pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.box, self.last = Box(), deque([0.0], maxlen=3)
        self.counts, self.seen, self.values = {"calls": 0}, {0}, np.zeros(2)
        self.plain = torch.zeros(2)
        self.old, self.new, self.torch = random.Random(1), np.random.default_rng(1), torch.Generator()
        self.legacy, self.pair = np.random.RandomState(1), ([0], "constant")
        self.newest = Newest()
        self.newest["a"], self.newest["b"] = 1, 2
        self.table = np.frombuffer(b"read-only", np.uint8)
        self.library = random  # a module is no state of the network

    def forward(self, x: torch.Tensor) -> Any:
        total = float(x.detach().sum())
        self.box.rows[0].append(total)
        self.last.append(total)
        self.counts["calls"] += 1
        self.newest["c"] = 3
        self.seen.add(len(self.seen))
        self.values += 1
        self.plain += 1
        self.pair[0].append(1)
        self.old.random(), self.new.random(), self.legacy.rand(), torch.rand(1, generator=self.torch)
        return self.layer(x)

    def state(self) -> list[Any]:
        generators = [self.old.getstate(), self.new.bit_generator.state, self.torch.get_state().tolist()]
        held = [self.box.rows, list(self.last), self.counts, self.seen, self.values.tolist(), self.pair]
        legacy = [part.tolist() if isinstance(part, np.ndarray) else part for part in self.legacy.get_state()]
        held.append(list(self.newest.items()))
        return copy.deepcopy([*generators, *held, self.plain.tolist(), legacy, self.training])


def test_the_checks_leave_all_that_a_network_holds_as_it_was(runs: Runs) -> None:
    network = Remembers()
    before = network.state()
    runs.check(40, UserObjects(module=network), model=None)
    assert network.state() == before
