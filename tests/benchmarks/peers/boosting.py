"""XGBoost, LightGBM and CatBoost on one table, each tuned by random search on the validation rows.

    python boosting.py FOLDER TABLE SECONDS

Runs in `.venv-peers-xgboost`. Every library gets the same seconds and all cores; it adds trees until the
validation score has not improved for 50 of them. The last line is JSON: library -> scores of the validation
and test rows (AUC, or minus the RMSE), trials and seconds. Each library gets categories, missing values and
times in the form that it accepts.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import catboost
import lightgbm
import numpy as np
import pandas as pd
import xgboost
from sklearn.metrics import mean_squared_error, roc_auc_score

TREES, PATIENCE = 4_000, 50
Trial = Callable[[dict[str, Any], Mapping[str, pd.DataFrame], bool], Any]


def read(folder: Path, name: str) -> tuple[dict[str, pd.DataFrame], bool]:
    """Returns split -> rows, and whether the label is a class."""
    about = json.loads((folder / "tables.json").read_text())[name]
    frame = pd.read_csv(folder / f"{name}.csv.gz", low_memory=False)
    for column, kind in about["columns"].items():
        if kind == "timestamp":
            when = pd.to_datetime(frame[column], utc=True)
            parts = {"hour": when.dt.hour, "weekday": when.dt.dayofweek, "day": when.dt.dayofyear}
            frame[column] = when.astype("int64") / 1e9
            frame = frame.assign(**{f"{column} {part}": values for part, values in parts.items()})
        elif kind in ("string", "boolean"):
            frame[column] = frame[column].astype("string").astype("category")
    splits = {split: rows.drop(columns="split") for split, rows in frame.groupby("split")}
    return splits, about["task"] == "binary"


def _xgboost(sampled: dict[str, Any], splits: Mapping[str, pd.DataFrame], is_class: bool) -> Any:
    kind = xgboost.XGBClassifier if is_class else xgboost.XGBRegressor
    model = kind(
        n_estimators=TREES,
        early_stopping_rounds=PATIENCE,
        enable_categorical=True,
        eval_metric="auc" if is_class else "rmse",
        learning_rate=sampled["rate"],
        max_depth=sampled["depth"],
        min_child_weight=sampled["leaf"],
        subsample=sampled["rows"],
        colsample_bytree=sampled["columns"],
        reg_lambda=sampled["l2"],
    )
    return model.fit(*xy(splits["train"]), eval_set=[xy(splits["valid"])], verbose=False)


def _lightgbm(sampled: dict[str, Any], splits: Mapping[str, pd.DataFrame], is_class: bool) -> Any:
    kind = lightgbm.LGBMClassifier if is_class else lightgbm.LGBMRegressor
    model = kind(
        n_estimators=TREES,
        verbosity=-1,
        learning_rate=sampled["rate"],
        num_leaves=2 ** min(sampled["depth"], 8) - 1,
        min_child_samples=max(2, int(sampled["leaf"])),
        subsample=sampled["rows"],
        subsample_freq=1,
        colsample_bytree=sampled["columns"],
        reg_lambda=sampled["l2"],
    )
    stop = lightgbm.early_stopping(PATIENCE, verbose=False)
    metric = "auc" if is_class else "rmse"
    inputs, label = xy(splits["valid"])
    return model.fit(*xy(splits["train"]), eval_X=inputs, eval_y=label, eval_metric=metric, callbacks=[stop])


def _catboost(sampled: dict[str, Any], splits: Mapping[str, pd.DataFrame], is_class: bool) -> Any:
    kind = catboost.CatBoostClassifier if is_class else catboost.CatBoostRegressor
    splits = {split: with_names(rows) for split, rows in splits.items()}
    model = kind(
        iterations=TREES,
        early_stopping_rounds=PATIENCE,
        eval_metric="AUC" if is_class else "RMSE",
        allow_writing_files=False,
        verbose=False,
        learning_rate=sampled["rate"],
        depth=min(sampled["depth"], 8),
        l2_leaf_reg=sampled["l2"],
        cat_features=[name for name in splits["train"].columns if is_name(splits["train"][name])],
    )
    return model.fit(*xy(splits["train"]), eval_set=xy(splits["valid"]))


LIBRARIES: dict[str, Trial] = {"xgboost": _xgboost, "lightgbm": _lightgbm, "catboost": _catboost}


def xy(rows: pd.DataFrame) -> tuple[pd.DataFrame, pd.Series]:
    """Returns the inputs and the label."""
    return rows.drop(columns="label"), rows["label"]


def is_name(column: pd.Series) -> bool:
    """Whether a column has strings or categories."""
    return isinstance(column.dtype, pd.CategoricalDtype) or column.dtype == object


def with_names(rows: pd.DataFrame) -> pd.DataFrame:
    """Returns the rows with plain strings as categories; CatBoost refuses missing ones."""
    names = {c: rows[c].astype(object).fillna("missing") for c in rows.columns if is_name(rows[c])}
    return rows.assign(**names)


def score(model: Any, rows: pd.DataFrame, is_class: bool) -> float:
    """Returns the AUC, or minus the RMSE."""
    inputs, label = xy(with_names(rows) if isinstance(model, catboost.CatBoost) else rows)
    if is_class:
        return float(roc_auc_score(label, model.predict_proba(inputs)[:, 1]))
    return -float(np.sqrt(mean_squared_error(label, model.predict(inputs))))


def main() -> None:
    """Tunes every library."""
    folder, name, seconds = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    splits, is_class = read(folder, name)
    results: dict[str, Any] = {}
    for library, trial in LIBRARIES.items():
        draw, start, trials = random.Random(0), time.monotonic(), 0
        best: tuple[float, float] | None = None
        while best is None or time.monotonic() - start < seconds:
            sampled = {
                "rate": 10 ** draw.uniform(-2, -0.7),
                "depth": draw.randint(3, 9),
                "leaf": 10 ** draw.uniform(0, 2),
                "rows": draw.uniform(0.6, 1),
                "columns": draw.uniform(0.5, 1),
                "l2": 10 ** draw.uniform(-1, 1.5),
            }
            model = trial(sampled, splits, is_class)
            found = score(model, splits["valid"], is_class), score(model, splits["test"], is_class)
            best, trials = max(best or found, found), trials + 1
        spent = round(time.monotonic() - start, 1)
        results[library] = {"valid": best[0], "test": best[1], "trials": trials, "seconds": spent}
    print(json.dumps(results))


if __name__ == "__main__":
    main()
