"""MLflow's `pyfunc` on pandas columns, which often have wider types than the training columns."""

import json
import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from ready_models import ready_model
from small_networks import Net, shows
from torch import nn

from ringspark.estimators import TorchClassificationModel, TorchModel
from ringspark.extras.serving.served_model import ServedModel, load_stage
from ringspark.pipelines import Array, Column, Padded, Scalar
from ringspark.pipelines.kinds import Kind

IDS, PAIR, TOKENS = Scalar(dtype="int64"), Array(dtype="int32", shape=(2,)), Padded(dtype="int8", length=2)


def served(kind: Any, network: nn.Module, folder: Path, values: Kind, width: int, **params: Any) -> Any:
    columns = [Column(name="x", kind=values)]
    stage = ready_model(kind, network, folder / "checkpoint", [(width,)], columns, featuresCol="x", **params)
    return ServedModel(stage)


def test_a_row_with_a_nan_output_has_no_class(tmp_path: Path) -> None:
    sign = shows(lambda x: x / x.abs())  # NaN for 0
    model = served(TorchClassificationModel, sign, tmp_path, Array(dtype="float32", shape=(2,)), 2)
    model.stage._labels = ("no", "yes")
    rows = pd.DataFrame({"x": [[-3.0, 1.0], [1.0, -1.0], [0.0, 1.0], [2.0, -0.5]]})
    found = model.predict(rows)
    assert found[model.stage.getPredictedLabelCol()].tolist() == ["yes", "no", None, "no"]
    assert math.isnan(found["prediction"][2])


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (IDS, [2.0**24 + 1, -3.0]),
        (PAIR, [[2.0**24 + 1, 7.0]]),
        (TOKENS, [[5.0], [-128.0, 6.0]]),
        (TOKENS, [[]]),
    ],
)
def test_whole_numbers_of_a_float_column_are_exact(tmp_path: Path, kind: Kind, values: list[Any]) -> None:
    width = 1 if kind is IDS else 2
    echo = Net(lambda self, x: x.reshape(len(x), -1), zero=nn.Parameter(torch.zeros(1)))
    model = served(TorchModel, echo, tmp_path, kind, width, predictionCols=["y"])
    found = model.predict(pd.DataFrame({"x": values}))["y"].tolist()
    padded = [value if width == 1 else [*value, *[0.0] * (2 - len(value))] for value in values]
    assert [value if width == 1 else list(value) for value in found] == padded
    with pytest.raises(ValueError, match="column 'x' has a null or NaN"):
        model.predict(pd.DataFrame({"x": [*values, None]}))


@pytest.mark.filterwarnings("ignore")  # MLflow's libraries warn about each other's next versions
@pytest.mark.parametrize("named", ["../other", "{folder}/other", "link"])
def test_a_stage_outside_of_a_logged_model_is_refused(tmp_path: Path, named: str) -> None:
    pytest.importorskip("mlflow")
    (tmp_path / "other").mkdir()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "link").symlink_to(tmp_path / "other")
    flavors = {"flavors": {"ringspark": {"stage": named.format(folder=tmp_path)}}}
    (tmp_path / "model" / "MLmodel").write_text(json.dumps(flavors))
    with pytest.raises(ValueError, match="leads out of its folder"):
        load_stage((tmp_path / "model").as_uri())
