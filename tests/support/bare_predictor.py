"""A `Predictor` without the results of Spark, for forward passes on a machine that has no Spark."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

from ringspark.estimators.inference.predictor import Predictor
from ringspark.models import ModelSpec


def bare_predictor(spec: ModelSpec, **settings: Any) -> Predictor:
    """Returns a predictor of a network with one output per row."""
    given = {"weights_uri": "", "weights_id": "", "feeds": (), "output_widths": (1,), **settings}
    results: Any = SimpleNamespace(inner_widths=(), capture=lambda module: nullcontext(list))
    return Predictor(model=spec.to_json(), results=results, **given)
