"""`offsetCol`: closed forms and scikit-learn, several workers, other forms of the model, and refusals."""

import math
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pytest
import sklearn.metrics as sk
import torch
from pyspark.sql import functions as F
from sklearn.linear_model import PoissonRegressor
from torch import nn

from ringspark.estimators import TorchClassifier, TorchRegressionModel, TorchRegressor
from ringspark.models import ModelSpec

pytestmark = pytest.mark.spark

ROWS = 60


class Rates(nn.Module):
    """A rate that depends on the features by a logarithmic link."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).exp()


class Logit(nn.Module):
    """The same logits for all rows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.bias.expand(len(x), -1)


@pytest.fixture(scope="module")
def numbers() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    x, exposure = rng.normal(size=(ROWS, 2)).astype("float32"), rng.uniform(0.2, 5, ROWS)
    counts = rng.poisson(exposure * np.exp(0.4 * x[:, 0] - 0.2 * x[:, 1]))
    return {"x": x, "exposure": exposure, "counts": counts, "weight": 1.0 + np.arange(ROWS) % 3}


@pytest.fixture(scope="module")
def table(spark: Any, numbers: dict[str, Any]) -> Any:
    rows = [
        (n, x.tolist(), math.log(e), int(y), int(y > 0), float(w))
        for n, (x, e, y, w) in enumerate(zip(*numbers.values(), strict=True))
    ]
    schema = "row int, features array<float>, log_exposure double, count int, any int, weight double"
    return spark.createDataFrame(rows, schema).repartition(2, "row").cache()


SETTINGS: dict[str, Any] = {
    "labelCol": "count",
    "offsetCol": "log_exposure",
    "weightCol": "weight",
    "loss": "poisson",
    "batchSize": ROWS,
    "epochs": 40,
    "learningRate": 0.3,
    "optimizer": "sgd",
    "metrics": ["poisson_deviance"],
    "showProgress": False,
    "collective": "torch",
}


@pytest.fixture(scope="module")
def model(table: Any) -> TorchRegressionModel:
    torch.manual_seed(0)
    return TorchRegressor(model=Rates(), numWorkers=2, **SETTINGS).fit(table)


def predictions(model: Any, rows: Any) -> list[float]:
    return [row.prediction for row in model.transform(rows).orderBy("row").collect()]


def test_weighted_counts_with_exposures_have_the_coefficients_of_scikit_learn(
    model: TorchRegressionModel, table: Any, numbers: dict[str, Any]
) -> None:
    x, exposure, counts, weight = numbers.values()
    reference = PoissonRegressor(alpha=0, tol=1e-10, max_iter=1000)
    reference.fit(x, counts / exposure, sample_weight=weight * exposure)
    linear = model.module().network.linear
    assert linear.weight[0].tolist() == pytest.approx(reference.coef_, abs=1e-4)
    assert linear.bias.item() == pytest.approx(reference.intercept_, abs=1e-4)
    # At the optimum, the weighted predictions sum to the weighted counts.
    found = predictions(model, table)
    assert np.dot(weight, found) == pytest.approx(np.dot(weight, counts), rel=1e-4)
    assert model.evaluate(table)["poisson_deviance"] == pytest.approx(
        sk.mean_poisson_deviance(counts, found), rel=1e-6
    )


def test_one_worker_trains_the_same_network(model: TorchRegressionModel, table: Any) -> None:
    torch.manual_seed(0)
    alone = TorchRegressor(model=Rates(), **SETTINGS | {"epochs": 5}).fit(table)
    torch.manual_seed(0)
    both = TorchRegressor(model=Rates(), numWorkers=2, **SETTINGS | {"epochs": 5}).fit(table)
    for name, value in alone.module().state_dict().items():
        torch.testing.assert_close(both.module().state_dict()[name], value, rtol=0, atol=1e-6)


@pytest.mark.filterwarnings("ignore")  # MLflow's libraries warn about each other's next versions
def test_saved_and_served_models_take_the_offset(
    model: TorchRegressionModel, table: Any, numbers: dict[str, Any], tmp_path: Path
) -> None:
    expected = predictions(model, table)
    doubled = table.withColumn("log_exposure", F.col("log_exposure") + math.log(2))
    assert predictions(model, doubled) == pytest.approx(2 * np.array(expected), rel=1e-5)
    model.save(str(tmp_path / "saved"))
    loaded = TorchRegressionModel.load(str(tmp_path / "saved"))
    assert predictions(loaded, table) == expected
    renamed = loaded.setOffsetCol("other")
    assert predictions(renamed, table.withColumnRenamed("log_exposure", "other")) == expected
    model.export(str(tmp_path / "net.pt2"))
    offset = torch.tensor(np.log(numbers["exposure"]), dtype=torch.float32)
    program = torch.export.load(str(tmp_path / "net.pt2")).module()
    exported = program(torch.tensor(numbers["x"]), offset)[:, 0].tolist()
    assert exported == pytest.approx(expected, rel=1e-6)
    model.export(str(tmp_path / "served"), format="mlflow")
    served = mlflow.pyfunc.load_model(str(tmp_path / "served"))
    found = served.predict(table.orderBy("row").select("features", "log_exposure").toPandas())
    assert found["prediction"].tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.modes
def test_a_spec_and_a_later_fit_keep_the_offset(table: Any, tmp_path: Path) -> None:
    spec = ModelSpec("linear", {"in_features": 2, "out_features": 1})
    plain = {name: value for name, value in SETTINGS.items() if name not in ("loss", "metrics")}
    first = TorchRegressor(model=spec, **plain | {"epochs": 1}).fit(table)
    first.save(str(tmp_path / "first"))
    shifted = table.withColumn("log_exposure", F.col("log_exposure") + 3)
    again = TorchRegressionModel.load(str(tmp_path / "first"))
    assert predictions(again, shifted) == pytest.approx(np.array(predictions(first, table)) + 3, abs=1e-5)
    later = TorchRegressor(
        initialModel=again, **SETTINGS | {"loss": "mse", "epochs": 1, "learningRate": 1e-9}
    )
    assert predictions(later.fit(table), table) == pytest.approx(predictions(first, table), abs=1e-5)


@pytest.mark.parametrize("width", [1, 2])
def test_the_offset_of_a_classifier_is_the_logit_of_the_last_class(table: Any, width: int) -> None:
    rows = table.select("row", "features", "any", F.lit(0.7).alias("known"))
    given = SETTINGS | {"labelCol": "any", "offsetCol": "known", "metrics": ["log_loss"], "loss": "auto"}
    given |= {"weightCol": None, "learningRate": 2.0}
    model = TorchClassifier(model=Logit(width), **given).fit(rows)
    share = rows.agg(F.avg("any")).head()[0]
    bias = model.module().network.bias.tolist()
    assert bias[-1] - (bias[0] if width == 2 else 0) == pytest.approx(
        math.log(share / (1 - share)) - 0.7, abs=1e-4
    )
    row = model.transform(rows).head()
    assert row.probability[1] == pytest.approx(share, abs=1e-3)
