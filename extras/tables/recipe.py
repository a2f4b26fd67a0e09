"""The network and the training settings for a table, as far as the user has not set them."""

from __future__ import annotations

from typing import Any

from ringspark.estimators.prepared_fit import is_for_tables
from ringspark.estimators.training.objective.deviance import family_of, find_power
from ringspark.extras.tables.monotone import find_signs
from ringspark.extras.tables.table_plan import TablePlan
from ringspark.extras.tables.tabm import RARE_FROM
from ringspark.models import ModelSpec

# Most inputs of the first layer, and the width at which few columns are embedded.
_WIDTHS, _WIDTH = 2_048, 12
_ROWS_PER_STEP = 256
_STEPS = 5_000
_MAX_EPOCHS = 100
# The largest table that `_STEPS` steps pass over four times. On a larger table, three members with different
# dropout train: on 1 M rows, eight members and two epochs had an AUC of 0.8629, three members and one epoch
# 0.8626.
LARGE = _STEPS * _ROWS_PER_STEP // 4
_LARGE_DROPOUTS = (0.0, 0.1, 0.3)


def complete_table(estimator: Any, plan: TablePlan, model: ModelSpec) -> dict[str, Any]:
    """Returns the settings that make an estimator train on the table: the model and the recipe."""
    arguments = {"edges": plan.edges, "cardinalities": plan.kind.cardinalities, **plan.outputs}
    if (width := _WIDTHS // (len(plan.edges) + len(plan.kind.cardinalities))) < _WIDTH:
        arguments |= dict.fromkeys(("number_width", "category_width"), max(1, width))
    if monotone := estimator.getMonotone():
        signs = find_signs(monotone, plan, {**plan.outputs, **model.kwargs}["out_features"])
        if model.kwargs.get("monotone", signs if is_for_tables(model) else []) != signs:
            raise ValueError(
                f"initialModel was not trained with monotone={monotone!r}; give the same monotone, or leave "
                "one of them unset"
            )
        arguments["monotone"] = signs
    if model.target == "tabpack" and plan.rows > LARGE and not {"rates", "dropouts"} & model.kwargs.keys():
        arguments |= {"rates": [1.0] * len(_LARGE_DROPOUTS), "dropouts": _LARGE_DROPOUTS}
    quantiles = estimator.getQuantiles() if estimator.hasParam("quantiles") else None
    if quantiles:
        arguments["quantiles"] = quantiles
    spec = ModelSpec(model.target, (arguments if is_for_tables(model) else {}) | model.kwargs)
    if estimator._task == "classification" and is_log(estimator):
        raise ValueError(
            f"loss {estimator.getLoss()!r} compares the label with a positive mean, and classes have none; "
            "use TorchRegressor, or leave loss unset"
        )
    if estimator._task == "regression" and is_log(estimator) != (spec.kwargs.get("link") == "log"):
        raise ValueError(
            f"loss {estimator.getLoss()!r} needs another network than this run, search or initialModel has; "
            "set the loss of the earlier fit, or start without it"
        )
    if (trained := spec.kwargs.get("quantiles")) != quantiles:
        raise ValueError(
            f"the network predicts the quantiles {trained}, and quantiles is {quantiles}; set quantiles to "
            "those of the network, or fit a new network without initialModel"
        )
    return {"model": spec, **_recipe(estimator, plan, model.target)}


def is_log(estimator: Any) -> bool:
    """Whether the network returns a positive mean, which the loss compares by a deviance."""
    return find_power(estimator.getLoss()) is not None


def _recipe(estimator: Any, plan: TablePlan, network: str) -> dict[str, Any]:
    """Returns values for training settings that the user has not set, and always a classifier's metrics."""

    def given(name: str, value: Any) -> Any:
        param = estimator.getParam(name)
        return estimator.getOrDefault(param) if estimator.isSet(param) else value

    batch = _ROWS_PER_STEP
    while batch > 32 and plan.rows < 20 * batch:
        batch //= 2
    is_large = plan.rows > LARGE
    used = given("batchSize", 4 * batch if is_large else batch)
    # Larger batches do not pass over the rows more often.
    passes = _STEPS // max(1, plan.rows // min(used, batch))
    epochs = given("epochs", max(1, min(_MAX_EPOCHS, passes)))
    batch, steps = used, max(1, plan.rows // used)
    least_epochs = epochs if estimator.getTimeBudgetSeconds() is None else 1
    is_pack = network == "tabpack"
    undecayed = ["*bias*", "head.*"] if is_pack else ["*bias*", "*.inputs", "*.outputs"]
    if plan.kind.cardinalities:
        undecayed.append("embeddings.*")
    if any(n > RARE_FROM for n in plan.kind.cardinalities):
        undecayed.append("effects.*")
    is_regression = estimator._task == "regression"
    recipe: dict[str, Any] = {
        "loss": "mse_per_member" if is_regression else "cross_entropy_per_member",
        "optimizer": "adamw",
        # Each member of a pack scales this rate. A large table often covers many months, and a high rate
        # overfits the days that were read last.
        "learningRate": (2e-3 if is_large else 3e-3) if is_pack else 1e-3,
        "weightDecay": 1e-2,
        "maxGradNorm": None if is_pack else 1.0,
        "lrSchedule": "cosine",
        "warmupSteps": steps * epochs // 30 if not estimator.isSet(estimator.lrSchedule) else None,
        "batchSize": batch,
        "epochs": epochs,
        "patience": max(8, epochs // 3),
        "keep": "best",
        # Over the steps of one epoch, because small tables are overfitted after a few epochs. In the end not
        # more than 1 % of the initial weights may remain in the average; a budget may end after one epoch.
        "emaDecay": min(1 - 1 / max(10, min(200, steps)), 0.01 ** (1 / (steps * least_epochs + 1))),
        "parameterGroups": [{"params": undecayed, "weightDecay": 0.0}],
    }
    if recipe["patience"] >= epochs:
        del recipe["patience"]
    if estimator._task == "any":
        del recipe["loss"]
    elif is_regression and is_log(estimator):
        loss = family_of(estimator.getLoss())
        family, *power = loss.split("_")
        recipe["metrics"] = ["_".join((family, "deviance", *power)), "rmse"]
        return {**unset(estimator, recipe), "loss": f"{loss}_per_member"}
    elif is_regression:
        recipe["metrics"] = ["rmse", "r2"]
        if quantiles := estimator.getQuantiles():
            recipe["loss"] = "pinball_per_member"
            recipe["metrics"] = ["pinball_loss", *(["coverage"] if quantiles[1:] else [])]
    else:
        # The temperature also if the user has other metrics.
        own = estimator.getMetrics() if estimator.isSet(estimator.metrics) else ["accuracy", "log_loss"]
        # A temperature would also divide the offset, which is known.
        is_complete = "temperature" in own or bool(estimator.getOffsetCol())
        recipe["metrics"] = own if is_complete else [*own, "temperature"]
        return {**unset(estimator, recipe), "metrics": recipe["metrics"]}
    return unset(estimator, recipe)


def unset(estimator: Any, recipe: dict[str, Any]) -> dict[str, Any]:
    unset = {name for name in recipe if not estimator.isSet(estimator.getParam(name))}
    return {name: value for name, value in recipe.items() if name in unset and value is not None}
