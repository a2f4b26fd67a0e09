"""`ServedModel`: raw rows in, the predictions of `transform` out."""

from __future__ import annotations

import json
import os
from typing import Any

import numpy as np
import pandas as pd

from ringspark.models.class_scores import decide, name_classes, probabilities, raw_scores
from ringspark.models.quantiles import quantile_columns
from ringspark.pipelines.kinds import kind_from_json
from ringspark.pipelines.local_rows import LocalInput, read_frame
from ringspark.pipelines.rows import NumpyArray

from .network import Network, load_network

FILE = "serving.json"
FORMAT_VERSION = 1


class ServedModel:
    """A network with its pre- and postprocessing.

    Attributes:
        text: Content of `serving.json`: `inputs`, `results`, `rows_per_pass`, `handle_invalid`, `runtime`.
    """

    def __init__(self, text: dict[str, Any], network: Network) -> None:
        self.text = text
        self._network = network
        kinds: dict[Any, Any] = {}
        self._inputs = []
        for entry in text["inputs"]:
            kind = entry["kind"] and kind_from_json(entry["kind"])
            # Equal types become one object, so that a column with several inputs is read once.
            self._inputs.append(LocalInput(**entry | {"kind": kinds.setdefault(kind, kind)}))

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
        inputs, problems = read_frame(self._inputs, frame)
        return inputs, {row: f"column {name!r} {why}" for row, (name, why) in problems.items()}

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
        for name, values in _columns(outputs, self.text["results"]):
            is_lists = isinstance(values, np.ndarray) and values.ndim > 1
            is_text = isinstance(values, list)
            columns[name] = pd.Series(
                values.tolist() if is_lists else values,
                index=index,
                dtype=object if is_lists or is_text else None,
            )
        return pd.DataFrame(columns, index=index)


def _columns(outputs: NumpyArray, results: dict[str, Any]) -> list[tuple[str, Any]]:
    """Returns name and values of each result column, from outputs of shape (rows, width) float64."""
    if results["type"] == "values":
        ends = np.cumsum(results["widths"])[:-1]
        parts = [part[:, 0] if part.shape[1] == 1 else part for part in np.split(outputs, ends, axis=1)]
    elif results["type"] == "quantiles":
        parts = quantile_columns(outputs, results["quantiles"], results["coverage"], results["correction"])
    else:
        parts = [raw_scores(outputs), probabilities(outputs), decide(outputs, results["thresholds"])]
    named: list[tuple[str, Any]] = list(zip(results["names"], parts, strict=True))
    if results["label_name"]:
        named.append((results["label_name"], name_classes(parts[-1], results["labels"])))
    return [(name, values) for name, values in named if name]
