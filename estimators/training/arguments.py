"""What a network gets of the columns: as a rule one tensor a column, which has one entry per row.

Rows of varying length lie end to end, as `torch.nn.EmbeddingBag` takes them: one argument holds all values
of the batch, another one says where each row starts. A sparse vector gives indices, starts and values.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from ringspark.estimators.training.settings.config import TrainConfig
from ringspark.pipelines import ShardManifest
from ringspark.pipelines.columns import Column
from ringspark.pipelines.kinds.base import BatchArray

Layout = tuple[int | None, ...]
"""For each input None if its first dimension is the rows, else the place of the input with the starts of its
rows; that input holds its own place."""


def arguments_of(columns: Iterable[Column], names: Sequence[str]) -> list[tuple[str, ...]]:
    """Returns, for each name, the batch arrays that a network gets: those of a column, or the one named.

    Args:
        names: Names of columns, or of one array of a column, such as "words.length". A name beside which
            another array of its column is named means the array alone.
    """
    by_name = {column.name: column for column in columns}

    def arguments(name: str) -> tuple[str, ...]:
        column = by_name.get(name)
        if column is None or {*column.kind.batch_names(name)} & {*names} - {name}:
            return (name,)
        return column.kind.arguments(name)

    return [arguments(name) for name in names]


def with_arguments(config: TrainConfig, manifest: ShardManifest) -> TrainConfig:
    """Returns the config with the names of batch arrays for those of columns."""
    expanded = arguments_of(manifest.columns, config.input_columns)
    return replace(config, input_columns=tuple(name for names in expanded for name in names))


def layout_of(arrays: Sequence[tuple[str, BatchArray]]) -> Layout:
    """Returns the layout of inputs with these names and descriptions; () if all are dense.

    Raises:
        ValueError: Values lack their starts, or starts their values; the message names both.
    """
    if all(array.per_row for _, array in arrays):
        return ()
    places = {name: place for place, (name, _) in enumerate(arrays)}
    if len(places) < len(arrays):
        raise ValueError(
            f"the inputs {[name for name, _ in arrays]} name a column of rows of varying length twice; "
            "copy it under another name"
        )
    users = {array.offsets for name, array in arrays if array.offsets and array.offsets != name}
    for name, array in arrays:
        if array.offsets and (array.offsets not in places or array.offsets not in users):
            column = name.rpartition(".")[0]
            raise ValueError(
                f"input {name!r} is of no use alone, as rows of column {column!r} vary in length; name "
                f"{column!r} itself, which gives all its arrays"
            )
    return tuple(places[array.offsets] if array.offsets else None for _, array in arrays)


def layout_in(manifest: ShardManifest, names: Sequence[str]) -> Layout:
    """Returns the layout of the inputs called `names` of shards."""
    return layout_of([(name, manifest.described(name)) for name in names])


def rows_in(inputs: Sequence[Any], layout: Layout) -> int:
    """Returns the number of rows of the inputs, which are tensors or arrays."""
    places = layout or (None,) * len(inputs)
    return next(len(given) for number, given in enumerate(inputs) if places[number] in (None, number))


def cut_rows(inputs: Sequence[Any], layout: Layout, start: int, stop: int) -> list[Any]:
    """Returns rows `start` to `stop` of the inputs, which are tensors or arrays."""
    rows, cut = rows_in(inputs, layout), []
    for number, given in enumerate(inputs):
        place = layout[number] if layout else None
        if place is None:
            cut.append(given[start:stop])
            continue
        first = int(inputs[place][start]) if start < rows else 0
        if place == number:
            cut.append(given[start:stop] - first)
        else:
            last = int(inputs[place][stop]) if stop < rows else len(given)
            cut.append(given[first:last] if start < stop else given[:0])
    return cut
