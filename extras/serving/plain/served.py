"""`ServedModel`: raw rows in, the predictions of `transform` out."""

from __future__ import annotations

import json
import os
from difflib import get_close_matches
from typing import Any

import numpy as np
import pandas as pd

from .columns import READERS, Source
from .network import Network, load_network
from .results import columns_of
from .values import NumpyArray, Reading, to_network_input

FILE = "serving.json"
FORMAT_VERSION = 1
MASK = ".isnull"


class ServedModel:
    """A network with its pre- and postprocessing.

    Attributes:
        text: Content of `serving.json`: `inputs`, `results`, `rows_per_pass`, `handle_invalid`, `runtime`.
    """

    def __init__(self, text: dict[str, Any], network: Network) -> None:
        self.text = text
        self._network = network

    @classmethod
    def load(cls, folder: str) -> ServedModel:
        with open(os.path.join(folder, FILE), encoding="utf-8") as file:
            text = json.load(file)
        if text["format_version"] != FORMAT_VERSION:
            raise ValueError(
                f"the model has format {text['format_version']}, but this process has imported code for "
                f"format {FORMAT_VERSION}; load the model in a process of its own"
            )
        return cls(text, load_network(folder, text["runtime"]))

    def predict(self, model_input: Any, params: dict[str, Any] | None = None) -> pd.DataFrame:
        """Returns the columns that `transform` adds, with one row per row of the input.

        A row that the model cannot predict raises ValueError, or has missing values if `handleInvalid` of the
        logged model is "keep" or "skip".
        """
        frame = model_input if isinstance(model_input, pd.DataFrame) else pd.DataFrame(model_input)
        size = int(self.text["rows_per_pass"])
        starts = range(0, max(1, len(frame)), size)
        parts = [self._predict_rows(frame.iloc[start : start + size], start) for start in starts]
        return pd.concat(parts) if len(parts) > 1 else parts[0]

    def _predict_rows(self, frame: pd.DataFrame, start: int) -> pd.DataFrame:
        inputs, problems = self._read(frame)
        if not problems:
            return self._make_frame(self._run(inputs, len(frame)), frame.index)
        if self.text["handle_invalid"] == "error":
            row, problem = min(problems.items())
            raise ValueError(
                f"{problem} in row {start + row} of the request; repair or drop the row, or log the model "
                "with handleInvalid='keep', which gives such rows no prediction"
            )
        kept = np.array([row for row in range(len(frame)) if row not in problems], np.int64)
        found = self._make_frame(np.zeros((0, self._width)), frame.index[:0])
        if len(kept):
            inputs, _ = self._read(frame.iloc[kept])
            found = self._make_frame(self._run(inputs, len(kept)), pd.RangeIndex(len(kept)))
        # None, because JSON has no NaN.
        cells: dict[str, list[Any]] = {name: [None] * len(frame) for name in found.columns}
        for name, column in cells.items():
            for row, value in zip(kept.tolist(), found[name].tolist(), strict=True):
                column[row] = value
        return pd.DataFrame(cells, index=frame.index, dtype=object)

    def _read(self, frame: pd.DataFrame) -> tuple[list[NumpyArray], dict[int, str]]:
        """Returns the network's inputs, and the problem of each row that cannot be predicted."""
        inputs, problems = [], dict[int, str]()
        read: dict[int, Reading] = {}
        for entry in self.text["inputs"]:
            name, number = entry["name"], entry["reading"]
            if number not in read:
                read[number] = self._read_column(frame, entry)
            reading = read[number]
            is_mask = entry["part"] == MASK
            if not is_mask:
                problems |= {row: f"column {name!r} {why}" for row, why in reading.problems.items()}
            inputs.append(to_network_input(reading.masked if is_mask else reading.arrays[entry["part"]]))
        return inputs, problems

    def _read_column(self, frame: pd.DataFrame, entry: dict[str, Any]) -> Reading:
        kind = entry["kind"]
        tables = {column["name"] for column in kind.get("columns", ())}
        found = {name: frame[find_column(frame, name)] for name in (tables or {entry["name"]})}
        source = Source(
            kind=kind,
            type=entry["type"],
            fills_nulls=entry["fills_nulls"],
            zone=entry["zone"],
            columns=found,
        )
        try:
            return READERS[kind.get("kind", "")](None if tables else found[entry["name"]], source)
        except ValueError as error:
            raise ValueError(f"column {error}" if tables else f"column {entry['name']!r} {error}") from None

    def _run(self, inputs: list[NumpyArray], rows: int) -> NumpyArray:
        if not rows:
            return np.zeros((0, self._width))
        parts = [np.asarray(output, np.float64).reshape(rows, -1) for output in self._network(inputs)]
        return np.concatenate(parts, axis=1)

    @property
    def _width(self) -> int:
        return int(sum(self.text["results"]["widths"]))

    def _make_frame(self, outputs: NumpyArray, index: Any) -> pd.DataFrame:
        columns = {}
        for name, values in columns_of(outputs, self.text["results"]):
            is_lists = isinstance(values, np.ndarray) and values.ndim > 1
            is_text = isinstance(values, list)
            columns[name] = pd.Series(
                values.tolist() if is_lists else values,
                index=index,
                dtype=object if is_lists or is_text else None,
            )
        return pd.DataFrame(columns, index=index)


def find_column(frame: pd.DataFrame, name: str) -> Any:
    """Returns the frame's name of a column.

    Like Spark, ignores case. If two names differ only by case, the name must match exactly.
    """
    if name in frame.columns:
        return name
    names = [str(column) for column in frame.columns]
    alike = [column for column in frame.columns if str(column).lower() == name.lower()]
    if len(alike) == 1:
        return alike[0]
    near = get_close_matches(name, names, 1)
    hint = f"; did you mean {near[0]!r}?" if near else f"; the request has {names}"
    raise ValueError(f"the model needs the column {name!r}, and the request lacks it{hint}")
