"""Prepares a fit that starts from a fitted model, the Param `initialModel`.

The fit takes the model's network, unless the estimator has its own, and the model's vocabularies and
classes: an id means the same string in every fit. The ranks load the weights from the model's folder.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from ringspark.estimators.columns.inputs import source_names
from ringspark.estimators.columns.schema import FieldIndex
from ringspark.estimators.stages.declared import value_of
from ringspark.estimators.stages.persistence import meaning_of
from ringspark.estimators.techniques import Technique
from ringspark.estimators.trained_model import TorchModel
from ringspark.estimators.training.settings.data import Label, Offset
from ringspark.estimators.training.settings.setting import settings_of
from ringspark.models import ModelSpec
from ringspark.models.program import Program
from ringspark.pipelines import ShardManifest, storage
from ringspark.pipelines.columns import Column
from ringspark.pipelines.kinds import HashBuckets, Kind, Scalar, Struct, TableRow, Tokens, Vocabulary
from ringspark.pipelines.kinds.scalar import TEMPORAL
from ringspark.pipelines.kinds.structs import join_path

OR_NEW = "or fit a new model without initialModel"


class InitialModel(Technique):
    """The hooks of the setting `initialModel`."""

    def complete_estimator(self, estimator: Any) -> Any:
        """Returns a copy of the estimator with the loaded `initialModel` and its network.

        Raises ValueError if the model has another task or other columns, or lacks the training state that
        `initialState` needs.
        """
        given = estimator.getInitialModel()
        if estimator.getPretrained() is not None:
            raise ValueError(
                "initialModel and pretrained both set the initial weights; leave one of them unset"
            )
        model = load_model(estimator._model_class, given, "initialModel") if isinstance(given, str) else given
        gets_label = model.without_label and estimator.hasParam("labelCol")
        if gets_label and estimator.getInitialState() == "optimizer":
            raise ValueError(
                "initialState='optimizer' needs an initialModel with the same label, and this one was "
                "trained without a label; set initialState='weights'"
            )
        fits = table_kind(model) is not None if gets_label else isinstance(model, estimator._model_class)
        if not fits:
            raise ValueError(
                f"initialModel of {type(estimator).__name__} must be a {estimator._model_class.__name__}, "
                f"got a {type(model).__name__}; fit with the estimator of the same task, or load weights "
                "by pretrained={'uri': ..., 'strict': False}"
            )
        model._trained().info()  # raises if the weights are gone
        if estimator.getInitialState() == "optimizer" and model._trained().training_state() is None:
            raise ValueError(
                "initialState='optimizer' continues from the training state of initialModel, and there is "
                f"none next to {storage.redact(model._trained().uri)}; fit the initial model with "
                "keepTrainingState=True, or set initialState='weights'"
            )
        made = estimator.copy({estimator.initialModel: model})
        _take_label(made, model)
        if table_kind(model) is not None:
            _check_table_network(made, model)
            return made
        if not made.isDefined(made.model):
            made._set(model=_network(model))
        _take_inputs(made, model)
        return made

    def complete_config(self, config: Any, objects: Any, given: Mapping[str, Any]) -> Any:
        model = given["initialModel"]
        if isinstance(model, str):  # not loaded, because no fit follows
            return config
        if model.without_label and "labelCol" in given:
            return config.with_values(pretrained=model._weights_to_tune())
        weights = model._trained()
        state = weights.training_state() if given["initialState"] == "optimizer" else None
        return config.with_values(initial_weights=weights.uri, initial_training_state=state)

    def choose_kinds(self, estimator: Any, kinds: dict[str, Kind], fields: FieldIndex) -> dict[str, Kind]:
        """Returns the column types of a fit: the user's choices, with the vocabularies of `initialModel`."""
        model, kinds = estimator.getInitialModel(), dict(kinds)
        if isinstance(model, str):
            return kinds
        for source, item in zip(
            source_names(model._inputs, model.inputColumns()), model._inputs, strict=True
        ):
            old = None if item.column is None else item.column.kind
            if isinstance(old, Struct):
                old = Struct(fields=old.fields)  # The rows may have the fields in another order.
            if old is not None and (old.is_choice or isinstance(old, Struct)):
                name = fields.find(source, "inputCols of initialModel").name
                kinds[name] = _agree(name, old, kinds.get(name))
        if model._labels:
            name = fields.find(estimator.getLabelCol(), "labelCol").name
            kinds[name] = _agree(name, Vocabulary(words=model._labels, order="alphabet"), kinds.get(name))
        return kinds

    def check_rows(self, estimator: Any, config: Any, manifest: ShardManifest) -> None:
        """Raises ValueError if the rows have other column types or classes than `initialModel`."""
        model = estimator.getInitialModel()
        for source, item in zip(
            source_names(model._inputs, model.inputColumns()), model._inputs, strict=True
        ):
            if item.column is None:
                continue
            old, new = item.column, manifest.column_of(source)
            if _meaning(old, source) != _meaning(new, source):
                before, now = (f"{c.kind}{_details(c)}" for c in (old, new))
                raise ValueError(
                    f"column {source!r} is {before} for initialModel and {now} in the rows; give rows of the "
                    f"same type and shape, {OR_NEW}"
                )
        if not model._labels:
            return
        label = manifest.column_of(config.label_columns[0])
        words = label.kind.words if isinstance(label.kind, Vocabulary) else None
        if words is None or words != model._labels:
            raise ValueError(
                f"labelCol {label.name!r} has other classes than initialModel, {_few(model._labels)}; write "
                "the shards with columns={label: Vocabulary(words=...)} of its classes"
            )
        for split, stats in manifest.stats.items():
            if (stats[label.name].maximum or 0) >= len(words):
                raise ValueError(
                    f"labelCol {label.name!r} has strings or nulls in the {split} rows that are no class of "
                    f"initialModel, {_few(words)}; drop these rows, {OR_NEW}"
                )


def table_kind(model: TorchModel) -> TableRow | None:
    """Returns the column type of the rows if `fit` made the model's network for a table, else None."""
    columns = [item.column for item in model._inputs if item.column is not None]
    kinds = [column.kind for column in columns if isinstance(column.kind, TableRow)]
    return kinds[0] if kinds else None


def load_model(cls: type[TorchModel], path: str, setting: str) -> TorchModel:
    """Loads a saved model, or the last stage of a saved PipelineModel, which jobs write."""
    stages = storage.join(meaning_of(path), "stages")
    names = [name for name in storage.list_names(stages) if name.partition("_")[0].isdecimal()]
    last = max(names, key=lambda name: int(name.partition("_")[0]), default=None)
    try:
        return cls.load(path if last is None else storage.join(stages, last))
    except ValueError as error:
        raise ValueError(f"{setting}: {error}") from error


def _take_label(estimator: Any, model: TorchModel) -> None:
    for name in settings_of(Label, Offset):
        if not model.hasParam(name) or (theirs := value_of(model, name)) == value_of(estimator, name):
            continue
        if estimator.isSet(name):
            raise ValueError(
                f"initialModel has {name} {theirs!r}, and the estimator has {value_of(estimator, name)!r}; "
                f"set {name} to the model's, {OR_NEW}"
            )
        estimator._set(**{name: theirs})


def _take_inputs(estimator: Any, model: TorchModel) -> None:
    wanted = model.inputColumns()
    if not estimator.isSet(estimator.inputCols) and not estimator.isSet(estimator.featuresCol):
        name = "inputCols" if model.isSet(model.inputCols) else "featuresCol"
        estimator._set(**{name: model.getOrDefault(name)})
    if estimator.inputColumns() != wanted:
        raise ValueError(
            f"initialModel takes the columns {wanted}, and the estimator has {estimator.inputColumns()}; "
            f"give the estimator the same inputCols or featuresCol, {OR_NEW}"
        )


def _check_table_network(estimator: Any, model: TorchModel) -> None:
    own = estimator.getModel() if estimator.isDefined(estimator.model) else None
    target = model._network_to_train().target
    if own is not None and (not isinstance(own, ModelSpec) or own.target != target):
        raise ValueError(
            f"initialModel is the network {target!r} for a table, and model is {own!r:.80}; "
            f"leave model unset, {OR_NEW}"
        )


def _network(model: TorchModel) -> Any:
    network = model.getModel()
    if isinstance(network, Program):
        raise ValueError(
            "initialModel was saved without the class of its network, so it predicts and cannot be trained; "
            "give the estimator a network of this class as model"
        )
    return network if isinstance(network, ModelSpec) else model.module().train()


def _agree(name: str, old: Kind, chosen: Kind | None) -> Kind:
    """Returns the column type for a column, from the model's type and the user's choice."""
    if chosen is None:
        return old
    is_same = type(chosen) is type(old)
    if isinstance(old, Vocabulary) and isinstance(chosen, Vocabulary):
        is_same = chosen.words in (None, old.words)
        chosen = old
    if not is_same:
        raise ValueError(
            f"the setting columns gives {name!r} the type {chosen!r}, but initialModel was trained on "
            f"{old!r}; leave {name!r} out of columns, {OR_NEW}"
        )
    return chosen


def _meaning(column: Column, name: str) -> Any:
    """Returns the properties of a column that must not change between two fits of a network."""
    kind = column.kind
    if isinstance(kind, Scalar):
        return "float" if kind.dtype.startswith("float") else "int", _details(column)
    if isinstance(kind, TableRow):  # each fit counts its own rows
        kind = kind.without_counts()
    ids = kind.to_json() if isinstance(kind, Vocabulary | TableRow | HashBuckets) else None
    arrays = [(a.dtype, None if a.varies else a.shape) for a in kind.arrays(name).values()]
    return type(kind), ids, _details(column), arrays


def _details(column: Column) -> str:
    """Describes what the text of a column type leaves out, but the numbers of a row depend on."""
    kind = column.kind
    if isinstance(kind, Struct):
        return f" with the fields {', '.join(map(join_path, kind.fields))}"
    if isinstance(kind, HashBuckets):
        return f" with the seed {kind.seed}"
    if isinstance(kind, Tokens):
        return f" of tokenizer {hashlib.sha256(kind.tokenizer.encode()).hexdigest()[:8]}"
    return f" of a {column.source}" if column.source in TEMPORAL else ""


def _few(words: Sequence[str]) -> str:
    more = f" and {len(words) - 5} more" if len(words) > 5 else ""
    return f"{', '.join(map(repr, words[:5]))}{more}"
