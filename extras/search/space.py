"""The space of a search: the estimator's Params that the search varies, and the range of each.

A name is a Param, or "model.x" for the argument x of the estimator's ModelSpec.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

from pyspark.ml.param import Param

from ringspark.estimators.checked_fit import CheckedFit
from ringspark.estimators.names import nearest
from ringspark.estimators.prepared_fit import PreparedFit
from ringspark.estimators.run.identity import identity_of
from ringspark.estimators.training.check.driver import check_training
from ringspark.extras.search import ranges
from ringspark.extras.search.ranges import SearchRange
from ringspark.models import ModelSpec
from ringspark.models.meta_device import build_on_meta
from ringspark.pipelines import ShardManifest

_REFUSED = {
    name: f"the search gives each trial its own {what}; leave it out"
    for name, what in (
        ("runUri", "folder"), ("resume", "way to resume"), ("storageUri", "place"), ("showProgress", "output")
    )
} | {"privacy": "each private training spends its own epsilon; fit each setting on its own"}  # fmt: skip

# Params that choose the rows and columns of a table, which all trials share.
_OF_TABLES = (
    *("timeCol", "validationFraction", "validationIndicatorCol"),
    *("labelCol", "offsetCol", "weightCol", "featuresCol", "inputCols", "columns"),
)

_SPEC = "model."


def as_param(given: Any) -> Any:
    """Returns a space as the Param stores it: ranges by name, as JSON if they have a JSON form."""
    if callable(given):
        return given
    if not isinstance(given, Mapping) or not given:
        raise TypeError(
            f"space must be a dict from Params to ranges, or a callable trial -> dict, got {given!r:.80}"
        )
    held = {}
    for key, value in given.items():
        name = key.name if isinstance(key, Param) else str(key)
        if isinstance(value, Mapping):
            try:
                value = ranges.from_json(dict(value))
            except ValueError as error:
                raise TypeError(f"space gives {name!r} something that is not a range: {error}") from None
        if not isinstance(value, SearchRange):
            raise TypeError(
                f"space must give {name!r} a range, such as Uniform(1e-4, 1e-1, log=True), IntRange(16, 256) "
                f"or Choice([...]), got {value!r:.80}"
            )
        held[name] = value.to_json() or value
    return held


class Space:
    """The space of one search: `ranges` by name, which are empty if a callable draws the values."""

    def __init__(
        self, given: Mapping[str, SearchRange] | Callable[[Any], Mapping[Any, Any]], prepared: PreparedFit
    ) -> None:
        self._prepared, self._estimator = prepared, prepared.estimator
        self._draw = given if callable(given) else None
        self.ranges = {} if callable(given) else dict(given)
        for name in self.ranges:
            self._check_name(name)
        # A model of the space comes first, because entries of its spec change it.
        for name in sorted(self.ranges, key=lambda name: name != "model"):
            for end in self.ranges[name].ends():
                self._check_value(name, end)

    @property
    def text(self) -> str:
        """Description of the space; equal spaces have equal text."""
        if self._draw is not None:
            return str(getattr(self._draw, "__qualname__", type(self._draw).__qualname__))
        return ", ".join(f"{name}: {value!r}" for name, value in sorted(self.ranges.items()))

    def fixed_settings(self, fit: CheckedFit, manifest: ShardManifest) -> dict[str, str]:
        """Returns the settings and the model that all trainings share, as text by name."""
        if self._draw is not None:
            return {}  # a callable may change any setting
        config = replace(fit.config, shards_uri=manifest.uri)
        config = check_training(config, fit.objects, manifest, fit.heads).config
        identity = identity_of(config, fit.objects, manifest)
        varied = {name.partition(".")[0] for name in self.ranges}
        settings = {**identity["settings"], **identity["model"]}
        if "model" in varied:
            # Such as the widths of its outputs.
            settings = {n: v for n, v in settings.items() if n not in identity["model"] and "model" not in n}
        return {name: json.dumps(value) for name, value in settings.items() if name not in varied}

    def varies(self, name: str) -> bool:
        return self._draw is not None or name in self.ranges

    def values(self, trial: Any) -> dict[str, Any]:
        """Returns an optuna trial's values by name; draws the values that the trial does not have yet."""
        if self._draw is None:
            return {name: found.suggest(trial, name) for name, found in self.ranges.items()}
        drawn = self._draw(trial)
        if not isinstance(drawn, Mapping):
            raise TypeError(f"space must return a dict from Params to values, got {drawn!r:.80}")
        named = {key.name if isinstance(key, Param) else str(key): value for key, value in drawn.items()}
        for name in named:
            self._check_name(name)
        return named

    def applied(self, values: Mapping[str, Any]) -> Any:
        estimator = self._estimator
        extra = {
            estimator.getParam(name): self._converted(name, value)
            for name, value in values.items()
            if not name.startswith(_SPEC)
        }
        made = estimator.copy(extra)
        entries = {
            name.removeprefix(_SPEC): value for name, value in values.items() if name.startswith(_SPEC)
        }
        if entries:
            spec = made.getModel()
            _check_spec(spec, next(iter(entries)))
            made = made.copy({made.getParam("model"): ModelSpec(spec.target, spec.kwargs | entries)})
        return self._prepared.complete(made, values)

    def _converted(self, name: str, value: Any) -> Any:
        try:
            return self._estimator.getParam(name).typeConverter(value)
        except (TypeError, ValueError) as error:
            raise ValueError(f"space gives {name!r} a value that this Param refuses: {error}") from None

    def _check_name(self, name: str) -> None:
        if name in _REFUSED:
            raise ValueError(f"space must not hold {name!r}, because {_REFUSED[name]}")
        shared = _OF_TABLES if self._prepared.plan is not None else ("timeCol",)
        if name in shared:
            raise ValueError(
                f"space must not hold {name!r}: all trials share the rows and columns; set it on the "
                "estimator"
            )
        if name.startswith(_SPEC):
            if "model" not in self.ranges:
                _check_spec(self._estimator.getModel(), name.removeprefix(_SPEC))
            return
        names = [param.name for param in self._estimator.params]
        if name not in names:
            hint = nearest(name, names) or f"; its Params are {names}"
            raise ValueError(
                f"space names {name!r}, which is not a Param of {type(self._estimator).__name__}{hint}"
            )

    def _check_value(self, name: str, value: Any) -> None:
        if not name.startswith(_SPEC):
            self._converted(name, value)
            if name == "model":
                self.applied({name: value})
            return
        if "model" in self.ranges:
            return  # a trial's model is not known yet
        changed = self.applied({name: value}).getModel()
        try:
            build_on_meta(changed.build)
        except ValueError as error:
            raise ValueError(
                f"space gives {name!r} the value {value!r}, but no model can be built with it: {error}"
            ) from None


def _check_spec(model: Any, name: str) -> None:
    if not isinstance(cast(object, model), ModelSpec):
        raise ValueError(
            f"space names 'model.{name}', an argument of a ModelSpec, but the model is a "
            f"{type(model).__name__}; give the estimator a ModelSpec, or 'model' a Choice of networks"
        )
