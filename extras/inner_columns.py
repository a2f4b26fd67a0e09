"""Outputs of inner modules of a network as columns: the setting `innerCols`.

Hooks on the modules keep their outputs while the network predicts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from pyspark.ml.linalg import VectorUDT
from pyspark.sql.types import DataType
from torch import nn

from ringspark.estimators.inference.precision import ReducedNetwork
from ringspark.estimators.inference.results import Forward, Results
from ringspark.estimators.names import nearest
from ringspark.estimators.techniques import Technique
from ringspark.estimators.training.batch_transforms import PreparedNetwork
from ringspark.estimators.training.feed import Array
from ringspark.extras.offset.network import OffsetNetwork
from ringspark.models import ModelSpec
from ringspark.models.meta_device import build_on_meta
from ringspark.models.program import Program

_PROBE_ROWS = (2, 3)


@dataclass(frozen=True)
class InnerValue:
    """The output of one module: its name, the dimension that counts rows, and the values per row."""

    module: str
    rows_dim: int
    width: int


@dataclass(frozen=True, kw_only=True)
class InnerResults(Results):
    """The columns of `base`, then a vector for each inner module."""

    base: Results
    inner: tuple[InnerValue, ...]

    @property
    def inner_widths(self) -> tuple[int, ...]:  # type: ignore[override]
        return tuple(value.width for value in self.inner)

    @property
    def types(self) -> list[DataType]:
        return [*self.base.types, *(VectorUDT() for _ in self.inner)]

    @property
    def widths(self) -> list[int]:
        return [*self.base.widths, *self.inner_widths]

    def arrays(self, outputs: Array) -> list[Array]:
        ends = np.cumsum([outputs.shape[1] - sum(self.inner_widths), *self.inner_widths])
        own, *inner = np.split(outputs, ends[:-1], axis=1)
        return [*self.base.arrays(own), *inner]

    @contextmanager
    def forward(self, module: nn.Module) -> Iterator[Forward]:
        owner = module
        while isinstance(owner, PreparedNetwork | ReducedNetwork):
            owner = owner.network
        names = [value.module for value in self.inner]
        with self.base.forward(module) as run, keep_outputs(owner, names) as found:
            yield lambda inputs: [
                *run(inputs),
                *(found[value.module].movedim(value.rows_dim, 0) for value in self.inner),
            ]


class InnerColumns(Technique):
    def output_columns(self, estimator: Any) -> list[str]:
        inner = estimator.getInnerCols()
        check_modules(estimator.getModel(), inner)
        return list(inner.values())


def check_modules(model: ModelSpec | nn.Module, names: Mapping[str, str]) -> None:
    """Raises ValueError if the network lacks a module of `innerCols`."""
    network = build_on_meta(model.build) if isinstance(model, ModelSpec) else model
    for name in names:
        find_module(network, name)


def find_module(network: nn.Module, name: str) -> nn.Module:
    if isinstance(network, OffsetNetwork):
        network = network.network
    known: dict[str, nn.Module] = dict(network.named_modules())
    if isinstance(network, Program):
        known = {name: module for name, (module, _) in network.inner.items()}
    if name in known and name:
        return known[name]
    names = [each for each in known if each]
    hint = nearest(name, names) or f"; it has {names[:20]}"
    if isinstance(network, Program):
        hint = f"{hint}; it was saved without its class, so save it again with this innerCols set"
    raise ValueError(f"innerCols names {name!r}, which is no module of {type(network).__name__}{hint}")


@contextmanager
def keep_outputs(module: nn.Module, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yields a dict that holds the latest output of each named module after a pass through the network."""
    found: dict[str, Any] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            value = output[0] if isinstance(output, tuple | list) and output else output
            # A copy, because a later layer may change its input in place, as nn.ReLU(inplace=True) does.
            found[name] = value.clone() if isinstance(value, torch.Tensor) else value

        return hook

    with ExitStack() as stack:
        for name in names:
            stack.enter_context(find_module(module, name).register_forward_hook(keep(name)))
        yield found


def measure(
    network: nn.Module, names: Sequence[str], samples: Callable[[int], Sequence[torch.Tensor]]
) -> tuple[InnerValue, ...]:
    """Runs the network on a few rows, and returns the shape of each inner module's output."""
    passes = []
    for rows in _PROBE_ROWS:
        with keep_outputs(network, names) as found, torch.inference_mode():
            network(*samples(rows))
        passes.append(found)
    values = []
    for name in names:
        shapes = [tuple(getattr(found.get(name), "shape", ())) for found in passes]
        places = [dim for dim, sizes in enumerate(zip(*shapes, strict=False)) if sizes == _PROBE_ROWS]
        same = [(*s[:p], *s[p + 1 :]) for s, p in zip(shapes, places * 2, strict=False)]
        if len(places) != 1 or len({len(s) for s in shapes}) > 1 or same[0] != same[1]:
            raise ValueError(
                f"innerCols needs a module that returns one entry per row, but {name!r} returns "
                f"{' and '.join(map(str, shapes))} for {' and '.join(map(str, _PROBE_ROWS))} rows; name "
                "another module"
            )
        values.append(InnerValue(name, places[0], int(np.prod(same[0], dtype=np.int64))))
    return tuple(values)
