"""scikit-learn on the flights, in one process with all cores. The variant is "boosting" or "perceptron"."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import contest
import numpy as np
import pyarrow.parquet as pq
from encoded_flights import NETWORK
from sklearn.neural_network import MLPClassifier
from sklearn.preprocessing import OneHotEncoder

import score


def read(path: Path) -> dict[str, Any]:
    """Returns the columns of one split, each (rows, columns), and the labels."""
    table = pq.read_table(path)
    rows = {name: np.stack(table[name].to_numpy(zero_copy_only=False)) for name in ("categorical", "numeric")}
    return {**rows, "label": table["label"].to_numpy()}


class Perceptron:
    """MLPClassifier over one-hot categories, with the layers, rate and batch size of our network."""

    def __init__(self) -> None:
        self._encoder = OneHotEncoder(
            handle_unknown="ignore", max_categories=contest.MAX_CATEGORIES, dtype=np.float32
        )
        self._network = MLPClassifier(
            NETWORK.hidden, batch_size=contest.BATCH_SIZE, early_stopping=True, random_state=0
        )

    def fit(self, rows: dict[str, Any]) -> Perceptron:
        """Trains until a held-out tenth of the rows does not improve."""
        self._encoder.fit(rows["categorical"])
        self._network.fit(self._matrix(rows), rows["label"])
        return self

    def late(self, rows: dict[str, Any]) -> Any:
        """Returns probabilities of class 1."""
        return self._network.predict_proba(self._matrix(rows))[:, 1]

    def _matrix(self, rows: dict[str, Any]) -> Any:
        return np.hstack([self._encoder.transform(rows["categorical"]).toarray(), rows["numeric"]])


def contestant(entry: contest.Entry) -> contest.Figures:
    """Loads the rows into memory before the timing, as Spark's frames are cached."""
    train, test = (read(Path(entry.flights, f"{name}.parquet")) for name in ("train", "test"))

    def fit() -> Any:
        if entry.variant == "boosting":
            return score.train_boosting(train, seed=0)
        return Perceptron().fit(train)

    def predict(model: Any) -> tuple[Any, Any]:
        if entry.variant == "boosting":
            return test["label"], model.predict_proba(score.boosting_matrix(test))[:, 1]
        return test["label"], model.late(test)

    return contest.measure_flights(fit, predict, len(train["label"]))


if __name__ == "__main__":
    contest.run(contestant)
