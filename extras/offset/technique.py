"""The setting `offsetCol`. Networks for tables take an offset themselves; other networks get a wrapper."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pyspark.sql.types import NumericType

from ringspark.estimators.prepared_fit import NETWORKS
from ringspark.estimators.techniques import Technique
from ringspark.estimators.training.objective.deviance import find_power
from ringspark.extras.offset.network import OffsetNetwork
from ringspark.models import ModelSpec
from ringspark.models.adapters import AdaptedNetwork

_TARGET = f"{OffsetNetwork.__module__}:{OffsetNetwork.__qualname__}"


class Offset(Technique):
    def check_estimator(self, estimator: Any, *, is_table: bool, is_on_shards: bool = False) -> None:
        if estimator.getTrainingStep() is not None:
            raise ValueError(
                "offsetCol adds an input to the network, but trainingStep calls the network itself; leave "
                "offsetCol unset, and add its column to inputCols"
            )
        if is_table and "temperature" in (estimator.getMetrics() or ()):
            raise ValueError(
                "the metric 'temperature' scales the logits, and the offset in them; leave 'temperature' out "
                "of metrics, or leave offsetCol unset"
            )
        if estimator.hasParam("quantiles") and len(estimator.getQuantiles() or ()) > 1:
            raise ValueError(
                f"offsetCol shifts a prediction of one number, but quantiles is {estimator.getQuantiles()}; "
                "set one quantile, or subtract the offset from the label and leave offsetCol unset"
            )

    def choose_kinds(self, estimator: Any, kinds: dict[str, Any], fields: Any) -> dict[str, Any]:
        field = fields.find(estimator._find_offset(fields), "offsetCol")
        if not isinstance(field.dataType, NumericType):
            raise ValueError(
                f"offsetCol {field.name!r} has type {field.dataType.simpleString()}; give a column with one "
                "number per row"
            )
        return kinds

    def wrap_network(self, model: Any, given: Mapping[str, Any], task: str) -> Any:
        is_spec = isinstance(model, ModelSpec)
        if isinstance(model, OffsetNetwork) or (is_spec and model.target in (*NETWORKS, _TARGET)):
            return model
        losses = given["loss"] if isinstance(given["loss"], list) else [given["loss"]]
        link = "logit" if task == "classification" else "log" if find_power(losses[0]) else "identity"
        if is_spec:
            return ModelSpec(
                _TARGET, {"network": {"target": model.target, "kwargs": model.kwargs}, "link": link}
            )
        return OffsetNetwork(model, link)

    def settle(self, training: Any, driver: Any) -> Any:
        config, module, shape = training.config, training.objects.module, training.shapes[0]
        if isinstance(module, OffsetNetwork) and isinstance(module.network, AdaptedNetwork):
            module.network.check_settings(config.task, config.losses)
        if training.heads[0].loss_name == "NLLLoss":
            raise ValueError(
                "offsetCol is added to logits, but loss 'NLLLoss' takes logarithms of probabilities; set "
                "loss='cross_entropy', and let the network return logits"
            )
        is_class = config.task == "classification"
        if shape not in ((), (1,), *([(2,)] if is_class else [])):
            what = "two classes" if is_class else "one number"
            raise ValueError(
                f"offsetCol shifts a prediction of {what}, but the network returns {shape[-1]} values per "
                f"row; give a label of {what}, or leave offsetCol unset"
            )
        return training
