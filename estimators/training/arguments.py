"""The arguments of a network: usually one tensor per input column, with one entry per row.

Rows of varying length are concatenated as for `torch.nn.EmbeddingBag`: values, and the start of each row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ringspark.estimators.training.settings.config import TrainConfig
from ringspark.pipelines import ShardManifest
from ringspark.pipelines.columns import Column
from ringspark.pipelines.kinds.base import BatchArray

InputLayout = tuple[int | None, ...]
"""For each input: None if its first dimension counts rows, else the index of the input that has the starts
of its rows. The input of starts has its own index."""


def list_arguments(columns: Iterable[Column], names: Sequence[str]) -> list[tuple[str, ...]]:
    """Returns the batch arrays that a network gets for each of `names`: names of columns or of their arrays.

    A column's name means all arrays that a network gets of its column type. If `names` also holds
    another array of the column, the name means only the array with the column's name.
    """
    by_name, given = {column.name: column for column in columns}, {*names}

    def arguments(name: str) -> tuple[str, ...]:
        column = by_name.get(name)
        if column is None or given.intersection(column.kind.batch_names(name)) - {name}:
            return (name,)
        return column.kind.arguments(name)

    return [arguments(name) for name in names]


def expand_arguments(config: TrainConfig, manifest: ShardManifest) -> TrainConfig:
    """Returns the config with each column name replaced by the names of the column's batch arrays."""
    expanded = list_arguments(manifest.columns, config.input_columns)
    return config.with_values(input_columns=tuple(name for names in expanded for name in names))


def make_layout(arrays: Sequence[tuple[str, BatchArray]]) -> InputLayout:
    """Returns the layout of the inputs `arrays`, (name, description) each; () if all are dense."""
    if all(array.per_row for _, array in arrays):
        return ()
    indices = {name: index for index, (name, _) in enumerate(arrays)}
    if len(indices) < len(arrays):
        raise ValueError(
            f"the inputs {[name for name, _ in arrays]} name the same column of variable length twice; "
            "copy it under another name"
        )
    users = {array.offsets for name, array in arrays if array.offsets and array.offsets != name}
    for name, array in arrays:
        if array.offsets and (array.offsets not in indices or array.offsets not in users):
            column = name.rpartition(".")[0]
            raise ValueError(
                f"input {name!r} cannot be used alone, because rows of column {column!r} vary in length; "
                f"name {column!r} itself, which means all its arrays"
            )
    return tuple(indices[array.offsets] if array.offsets else None for _, array in arrays)


def read_layout(manifest: ShardManifest, names: Sequence[str]) -> InputLayout:
    return make_layout([(name, manifest.described(name)) for name in names])


def count_rows(inputs: Sequence[Any], layout: InputLayout) -> int:
    layout = layout or (None,) * len(inputs)
    return next(len(given) for number, given in enumerate(inputs) if layout[number] in (None, number))


def slice_rows(inputs: Sequence[Any], layout: InputLayout, start: int, stop: int) -> list[Any]:
    rows, found = count_rows(inputs, layout), []
    for number, given in enumerate(inputs):
        index = layout[number] if layout else None
        if index is None:
            found.append(given[start:stop])
            continue
        first = int(inputs[index][start]) if start < rows else 0
        if index == number:
            found.append(given[start:stop] - first)
        else:
            last = int(inputs[index][stop]) if stop < rows else len(given)
            found.append(given[first:last] if start < stop else given[:0])
    return found
