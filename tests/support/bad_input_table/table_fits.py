"""Tables on which `fit` without a model cannot train."""

from typing import Any

from pyspark.sql import functions as F

from bad_input_table.place import BadInput, Place, unread
from ringspark.estimators import TorchClassifier, TorchRegressor
from ringspark.models import ModelSpec

R = BadInput


def table_fit(
    place: Place, *columns: Any, kind: Any = TorchClassifier, rows: str = "true", **params: Any
) -> Any:
    estimator = kind(storageUri=place.storage, showProgress=False, **params)
    return estimator.fit(place.table.where(rows).select(*columns))


def regression(place: Place, *columns: Any, **params: Any) -> Any:
    return table_fit(place, *columns, kind=TorchRegressor, **params)


def quantile_fit(place: Place, **params: Any) -> Any:
    return regression(place, "half", "many", labelCol="half", **params)


# fmt: off
TABLE_FITS = [
    R("table: a temperature of offsets",
      lambda p: table_fit(p, "label", "half", "many", offsetCol="half", metrics=["temperature"]),
      "scales the logits, and the offset in them", "leave 'temperature' out of metrics"),
    R("table: nothing but the label", lambda p: table_fit(p, "label"),
      "no column besides the label 'label'", "give it some inputs"),
    R("table: label mistyped", lambda p: table_fit(p, "label", "half", labelCol="labl"),
      "labl", "label"),
    R("table: input mistyped", lambda p: table_fit(p, "label", "half", inputCols=["hafl"]),
      "hafl", "half"),
    R("table: only constants",
      lambda p: regression(p, "many", "zero", F.lit("x").alias("word"), labelCol="many"),
      "no column of the table is of use to a network", "every row has the same value.*give other columns"),
    R("table: only maps", lambda p: regression(p, "many", "lookup", labelCol="many"),
      "no column of the table is of use to a network", "cannot take this type.*give other columns"),
    R("table: no rows", lambda p: table_fit(p, "label", "half", rows="false"),
      "label 'label' has no value", "takes 2 to 1,000 classes"),
    R("table: one class", lambda p: table_fit(p, F.lit(1).alias("label"), "half"),
      "label 'label' has one value", "takes 2 to 1,000 classes"),
    R("table: label is a struct", lambda p: table_fit(p, "pair", "half", labelCol="pair"),
      "label 'pair' holds struct", "give a column of strings or of class numbers"),
    R("table: label is below 0", lambda p: table_fit(p, "negative", "half", labelCol="negative"),
      "negative", "0"),
    R("table: label is a fraction", lambda p: table_fit(p, "half", "many", labelCol="half"),
      "half", "TorchRegressor"),
    R("table: regression of texts", lambda p: regression(p, "text", "half", labelCol="text"),
      "label 'text' holds string", "give a column of numbers, or a model"),
    R("table: regression of NaN", lambda p: regression(p, "broken", "half", labelCol="broken"),
      "label 'broken' has NaN or infinite values", "drop these rows"),
    R("monotone: no direction", lambda p: table_fit(p, "label", "half", monotone={"half": "up"}),
      "monotone must map names of columns to 'increasing' or 'decreasing'", "got .*up", TypeError),
    R("monotone: a model of the user", lambda p: unread(p, monotone={"features": "increasing"}),
      "monotone needs the network 'tabpack'", "without model, or leave monotone unset"),
    R("monotone: mistyped", lambda p: table_fit(p, "label", "half", monotone={"hafl": "increasing"}),
      "monotone 'hafl' is not a column", "half"),
    R("monotone: texts", lambda p: table_fit(p, "label", "half", "text", monotone={"text": "increasing"}),
      "monotone names the column 'text', which is of type string", "name numeric inputs"),
    R("monotone: the label", lambda p: table_fit(p, "label", "half", monotone={"label": "increasing"}),
      "monotone names the column 'label', which is no input", "name numeric inputs"),
    R("monotone: three classes",
      lambda p: table_fit(p, F.expr("many % 3 AS label"), "half", monotone={"half": "increasing"}),
      "monotone needs two classes or a regression, and the label has 3", "leave monotone unset"),
    R("table: one row", lambda p: regression(p, "half", "many", labelCol="half", rows="id = 3"),
      "the table has 1 rows, .* to train on and .* held out", "give more rows"),
    R("table: all rows held out",
      lambda p: regression(p, "half", "many", F.lit(True).alias("held"), labelCol="half",
                           validationIndicatorCol="held"),
      "the table has 60 rows, 0 to train on and 60 held out", "validationIndicatorCol"),
    R("table: no row held out",
      lambda p: regression(p, "half", "many", "never", labelCol="half", validationIndicatorCol="never"),
      "the table has 60 rows, 60 to train on and 0 held out", "validationIndicatorCol"),
    R("table: indicator mistyped",
      lambda p: table_fit(p, "label", "half", "never", validationIndicatorCol="nevr"), "nevr", "never"),
    R("table: indicator and a fraction",
      lambda p: table_fit(p, "label", "half", "never", validationIndicatorCol="never",
                          validationFraction=0.5),
      "set validationIndicatorCol or validationFraction, not both", "each chooses"),
    R("table: indicator and a time",
      lambda p: table_fit(p, "label", "half", "never", validationIndicatorCol="never", timeCol="half"),
      "set validationIndicatorCol or timeCol, not both", "each chooses"),
    R("table: time mistyped", lambda p: table_fit(p, "label", "half", timeCol="hafl"), "hafl", "half"),
    R("table: time of texts", lambda p: table_fit(p, "label", "text", timeCol="text"),
      "timeCol 'text' must hold dates, timestamps or numbers", "it holds string"),
    R("table: time without change", lambda p: table_fit(p, "label", "half", "zero", timeCol="zero"),
      "timeCol 'zero' is 0.0 in every row", "give validationFraction instead"),
    R("table: no seconds to train", lambda p: table_fit(p, "label", "half", timeBudgetSeconds=0),
      "timeBudgetSeconds must", "above 0"),
    R("table: two columns of one name", lambda p: table_fit(p, "label", "half", F.col("many").alias("half")),
      "columns 'half' and 'half' have the same name", "rename or drop one"),
    R("table: names in two cases", lambda p: table_fit(p, "label", "half", F.col("many").alias("Half")),
      "columns 'half' and 'Half' differ only in case", "rename or drop one"),
    R("table: counts below 0",
      lambda p: regression(p, "negative", "half", labelCol="negative", loss="poisson"),
      "labelCol 'negative' has the value -30, but loss 'poisson' takes", "drop such rows"),
    R("table: amounts of 0", lambda p: regression(p, "many", "half", labelCol="many", loss="gamma"),
      "labelCol 'many' has the value 0, but loss 'gamma' takes labels above 0", "drop such rows"),
    R("table: no count", lambda p: regression(p, "zero", "half", labelCol="zero", loss="tweedie"),
      "label 'zero' is 0 in all training rows", "give rows with larger labels"),
    R("table: exposure without a logarithm",
      lambda p: regression(p, "many", "half", (F.col("half") * 1000).alias("days"), labelCol="many",
                           loss="poisson", offsetCol="days"),
      "offsetCol 'days' has values up to 9", "give the logarithm of the exposure"),
    R("table: offset mistyped", lambda p: regression(p, "many", "half", labelCol="many", offsetCol="hafl"),
      "offsetCol 'hafl' is not a column", "did you mean 'half'"),
    R("table: option of the network mistyped",
      lambda p: table_fit(p, "label", "half", model=_tabm(widh=8)), "widh", "width"),
    *(R(f"table: quantiles {given}", lambda p, given=given: quantile_fit(p, quantiles=given),
        "quantiles must be ascending numbers between 0 and 1", r"\(0.1, 0.5, 0.9\)")
      for given in ((0.9, 0.1), (0.5, 0.5), (0.0, 0.5), (0.5, 1.5), (float("nan"),), ())),
    R("table: quantiles of an own network",
      lambda p: quantile_fit(p, quantiles=(0.1, 0.9), featuresCol="features",
                             model=ModelSpec("mlp", {"in_features": 3, "hidden": [], "out_features": 1})),
      "quantiles needs a network for tables", "leave model unset"),
    R("table: classes by a deviance", lambda p: table_fit(p, "label", "half", loss="poisson"),
      "loss 'poisson' compares the label with a positive mean, and classes have none", "use TorchRegressor"),
    R("table: quantiles with an offset", lambda p: quantile_fit(p, quantiles=[0.1, 0.9], offsetCol="many"),
      "offsetCol shifts a prediction of one number, but quantiles is .0.1, 0.9.", "set one quantile"),
    R("table: quantiles by another loss", lambda p: quantile_fit(p, quantiles=(0.1, 0.9), loss="l1"),
      "quantiles are learned by loss='pinball_per_member', got 'l1'", "leave loss unset"),
    R("table: quantiles of a teacher", lambda p: quantile_fit(p, quantiles=(0.1, 0.9), teacher="nowhere"),
      "quantiles do not work with teacher", "leave one of them unset"),
    R("table: coverage of no quantiles", lambda p: quantile_fit(p, metrics=["coverage"]),
      "metric 'coverage' needs at least 2 quantiles", "set quantiles of TorchRegressor, or drop the metric"),
    R("table: intervals for all labels", lambda p: quantile_fit(p, intervals=1.0),
      "intervals must lie between 0 and 1", "got 1.0"),
    R("table: intervals of an own network",
      lambda p: quantile_fit(p, intervals=0.5, featuresCol="features",
                             model=ModelSpec("mlp", {"in_features": 3, "hidden": [], "out_features": 1})),
      "intervals needs a network for tables", "leave model unset"),
    R("table: intervals of few rows", lambda p: quantile_fit(p, intervals=0.99),
      "intervals=0.99 needs at least 99 held-out rows, and there are", "raise validationFraction, or lower"),
    R("table: group of intervals mistyped",
      lambda p: quantile_fit(p, intervals=0.5, intervalGroupCol="manny"), "intervalGroupCol 'manny'", "many"),
    R("table: groups of intervals are fractions",
      lambda p: quantile_fit(p, intervals=0.5, intervalGroupCol="half"),
      "intervalGroupCol 'half' must hold strings, whole numbers, booleans or dates", "cast it"),
    R("table: interval has the name of the prediction",
      lambda p: quantile_fit(p, intervals=0.5, intervalCol="prediction"), "output columns must differ", ""),
    R("table: negative width", lambda p: table_fit(p, "label", "half", model=_tabm(width=-1)),
      "width", "at least 1"),
]
# fmt: on


def _tabm(**options: Any) -> Any:
    return ModelSpec("tabm", options)
