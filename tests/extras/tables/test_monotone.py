"""Predictions of networks for tables never fall, or never rise, with the numbers of `monotone`."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import functions as F

from ringspark.estimators import TorchClassificationModel, TorchClassifier, TorchRegressor
from ringspark.extras.tables.tabpack import Packed, TabPack
from ringspark.models import ModelSpec

EDGES = [[-1.0, -0.25, 0.5, 2.0], [-2.0, 1.0], [-1.0, 0.0, 0.125, 0.25, 1.0]]
# On the edges, next to them, and beyond them.
VALUES = sorted(
    {e + d for edges in EDGES for e in edges for d in (-1e-6, 0.0, 1e-6)} | {-1e6, -9.0, 9.0, 1e6}
)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    signs=st.lists(st.sampled_from([-1, 0, 1]), min_size=3, max_size=3),
    out=st.sampled_from([1, 2, 3]),  # a value, two classes, three quantiles
    size=st.sampled_from([0.1, 1.0, 10.0]),
    is_training=st.booleans(),
)
def test_no_random_network_violates_a_sign(
    seed: int, signs: list[int], out: int, size: float, is_training: bool
) -> None:
    torch.manual_seed(seed)
    averages = "probabilities" if out == 2 else "values"
    sizes: dict[str, Any] = {"width": 8, "depth": 2, "rates": (1.0, 0.3), "dropouts": (0.0, 0.4)}
    sizes["quantiles"] = (0.1, 0.5, 0.9) if out == 3 else ()
    net = TabPack(EDGES, [3, 50], out, averages=averages, center=5.0, scale=0.1, monotone=signs, **sizes)
    net = net.double()
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter, std=size)
    if out == 2:
        net.temperature.fill_(0.5)
    for packed in net.modules():
        if isinstance(packed, Packed):
            packed.keep(torch.tensor([True, False]))
    net.shares.copy_(torch.tensor([0.3, 0.7]))
    values = torch.tensor(VALUES, dtype=torch.float64)
    for number, sign in enumerate(signs):
        others = torch.randn(1, 3, dtype=torch.float64) * 2
        others[:, (number + 1) % 3] = torch.nan if seed % 2 else 0.5
        rows = others.repeat(len(values), 1)
        rows[:, number] = values
        ids = torch.tensor([[1, 7]]).repeat(len(values), 1)
        net.train(is_training)
        net.unknown = 0.0
        net.hidden.eval() if is_training else None  # each row would get its own dropout
        outputs = net(rows, ids)
        score = outputs[..., 1] - outputs[..., 0] if out == 2 else outputs
        steps = sign * score.diff(dim=0)
        assert steps.min() >= -1e-9 * score.abs().max().clamp_min(1)


def test_the_constrained_numbers_are_learned() -> None:
    """A step and a product with a free number, from noise that falls with the constrained number at first."""
    torch.manual_seed(0)
    net = TabPack(EDGES[:2], [], 1, rates=(1.0,), dropouts=(0.0,), width=16, monotone=[1, 0])
    x = torch.rand(512, 2) * 2 - 1
    y = torch.where(x[:, 0] > 0, 2.0 + x[:, 1], 0.0)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    for _ in range(300):
        loss = (net(x, torch.empty(512, 0, dtype=torch.long))[:, 0, 0] - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.1 * y.var()


@pytest.mark.parametrize("signs", [[1], [2, 0, 0]])
def test_other_signs_are_refused(signs: list[int]) -> None:
    with pytest.raises(ValueError, match="monotone must have -1, 0 or 1 per number"):
        TabPack(EDGES, [], 1, monotone=signs)
    with pytest.raises(ValueError, match="at most two classes"):
        TabPack(EDGES, [], 3, monotone=[1, 0, 0])


@pytest.mark.slow
@pytest.mark.spark
def test_predictions_and_probabilities_keep_the_directions(spark: Any, tmp_path: Path) -> None:
    # Each age has its own values, so without `monotone` it would be an id, too.
    frame = spark.range(0, 600, 1, 2).selectExpr(
        "CAST(id % 60 AS INT) AS age",
        "IF(id % 9 = 0, NULL, pow(id % 17, 2)) AS price",
        "concat('c', id % 3) AS city",
        "2 * sin(37 * (id % 60)) + (id % 60) / 30 - (id % 17) / 8 AS value",
    )
    # Spark finds the columns in another spelling.
    spec = ModelSpec("tabpack", {"rates": [1.0, 0.3], "dropouts": [0.0, 0.3], "width": 16})
    shared: dict[str, Any] = {"model": spec, "storageUri": str(tmp_path), "epochs": 2, "showProgress": False}
    monotone = {"PRICE": "decreasing", "age": "increasing"}
    rows = frame.withColumn("value", F.expr("IF(value > 0, 'yes', 'no')"))
    regression = TorchRegressor(labelCol="value", monotone=monotone, **shared).fit(frame)
    classifier = TorchClassifier(labelCol="value", monotone=monotone, **shared).fit(rows)
    classifier.save(str(tmp_path / "saved"))
    classifier = TorchClassificationModel.load(str(tmp_path / "saved"))
    uses = {use.column: use.use for use in regression.summary.column_uses}
    assert uses == {"age": "number", "price": "number", "city": "category"}
    assert regression.getModel().kwargs["monotone"] == [1, -1]
    for name, sign, others in (
        ("age", 1, "CAST(NULL AS DOUBLE) AS price, 'c1' AS city"), ("price", -1, "7 AS age, 'c2' AS city")
    ):  # fmt: skip
        kind = "INT" if name == "age" else "DOUBLE"
        grid = spark.range(0, 160, 1, 1).selectExpr(
            "id", f"CAST((id - 40) * 4 AS {kind}) AS {name}", *others.split(", ")
        )
        found = regression.transform(grid).toPandas().sort_values("id")["prediction"].to_numpy()
        assert (sign * np.diff(found)).min() >= -1e-5 < 1e-3 < sign * (found[-1] - found[0])
        found = classifier.transform(grid).toPandas().sort_values("id")["probability"]
        chance = np.array([each[1] for each in found])
        assert classifier.labels == ["no", "yes"]
        assert (sign * np.diff(chance)).min() >= -1e-6
    with pytest.raises(ValueError, match=r"initialModel was not trained with monotone=.*; give the same"):
        TorchRegressor(
            labelCol="value", monotone={"age": "decreasing"}, initialModel=regression, **shared
        ).fit(frame)
