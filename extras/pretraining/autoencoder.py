"""`TorchAutoencoder`: trains a network to reconstruct its inputs, without a label."""

from __future__ import annotations

import json
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from ringspark.estimators.options.finetuning import Pretrained
from ringspark.estimators.prepared_fit import wants_table
from ringspark.estimators.torch_estimator import _TorchEstimator
from ringspark.estimators.trained_model import TorchModel
from ringspark.estimators.training.settings.choices import Task
from ringspark.extras.pretraining.autoencoder_params import AutoencoderParams
from ringspark.extras.pretraining.corruption import Corruption, Role
from ringspark.extras.pretraining.losses import ReconstructionLoss, TableLoss
from ringspark.extras.pretraining.table_networks import OF_LABEL, OF_OUTPUTS, PRETRAINING
from ringspark.extras.tables.table_plan import TablePlan
from ringspark.extras.tables.tabpack import DROPOUTS, RATES
from ringspark.models import ModelSpec
from ringspark.models.meta_device import build_on_meta
from ringspark.pipelines.kinds import Kind, Tokens

E = TypeVar("E", bound="TorchAutoencoder")

# Share of a table's values that are masked by default. Without masks the network could copy its inputs.
TABLE_MASK = 0.3


class TorchAutoencoderModel(TorchModel):
    """Made by `TorchAutoencoder`; the predictions are the reconstructed inputs."""

    without_label = True

    def _network_to_train(self) -> Any:
        spec = self.getModel()
        names = {path: name for name, path in PRETRAINING.items()}
        if not isinstance(spec, ModelSpec) or spec.target not in names:
            return spec
        # The table adds these arguments again.
        kwargs = {k: v for k, v in spec.kwargs.items() if k not in ("edges", "cardinalities", *OF_LABEL)}
        if names[spec.target] == "tabpack":
            # As many members as in the pretraining, also if the table with labels is large.
            kwargs = {"rates": [*RATES], "dropouts": [*DROPOUTS], **kwargs}
        return ModelSpec(names[spec.target], kwargs)

    def _weights_to_tune(self) -> Pretrained:
        """Returns the weights of every layer except the last one."""
        names = build_on_meta(self.getModel().build).state_dict()
        ignore = [each for each in OF_OUTPUTS if any(fnmatchcase(name, each) for name in names)]
        return Pretrained(uri=self._trained().uri, ignore=tuple(ignore), strict=False)


class TorchAutoencoder(AutoencoderParams, _TorchEstimator[TorchAutoencoderModel]):
    """Trains a network to reconstruct its inputs. Like Spark's PCA and KMeans, it has no `labelCol`.

    With `predictionCols`, the network returns one output per input. Without it, the network returns one
    output: the input, or the numbers of all inputs side by side. Numbers are compared by squared error.
    Integers of a single input are ids, and the network returns logits. Without a `model`, the network for
    tables learns to predict masked values of every column.
    """

    _task: Task = "any"
    _model_class = TorchAutoencoderModel

    def _label_columns(self) -> list[str]:
        # The targets replace these columns, unless they are the inputs themselves.
        return self.inputColumns() if self.getPredictionCols() is not None else self.inputColumns()[:1]

    def _label_param(self) -> str:
        return "featuresCol or inputCols"

    def _complete(self: E) -> E:
        made: E = super()._complete()
        # A copy: the user's stage keeps its settings.
        return made if wants_table(made) else made.copy()._set(**made._objective())

    def _objective(self) -> dict[str, Any]:
        """Returns the settings `loss` and `transformBatch` for a network of the user."""
        mask, names, kinds = self.getMask() or 0.0, self.inputColumns(), self.getColumns()
        roles = [role for name in names for role in _roles(kinds.get(name), name)]
        joins = len(names) > 1 and self.getPredictionCols() is None
        if mask:
            self._check_free(mask)
        objective = {} if self.isSet(self.loss) else {"loss": ReconstructionLoss()}
        if not (mask or self.getNoise() or joins or "valid" in roles):
            return objective
        if self.getTransformBatch() is not None:
            raise ValueError(
                "transformBatch cannot be set with noise, mask or several inputs, because they set it "
                "themselves; put your function into the network"
            )
        value, mask_id = self.getMaskValue(), self.getMaskId()
        corruption = Corruption(
            roles=tuple(roles),
            noise=self.getNoise(),
            mask=mask,
            mask_value=tuple(value) if isinstance(value, list) else value or 0.0,
            mask_id=_mask_id([kinds.get(name) for name in names]) if mask_id is None else mask_id,
            joins=joins,
        )
        return {"transformBatch": corruption, **objective}

    def _table_objective(self, plan: TablePlan) -> dict[str, Any]:
        """Returns the settings `model`, `loss` and `transformBatch` for a table without a label."""
        given, spec = self.getMask(), self.getModel()
        mask = TABLE_MASK if given is None else given
        self._check_free(mask)
        if not mask:
            raise ValueError(
                f"TorchAutoencoder without a model learns from masked values, got mask={mask}; set mask "
                "above 0, or give a model"
            )
        if self.getTransformBatch() is not None or self.getNoise():
            raise ValueError(
                "TorchAutoencoder without a model takes neither noise nor transformBatch; leave both unset"
            )
        kwargs = {name: value for name, value in spec.kwargs.items() if name not in OF_LABEL}
        return {
            "model": ModelSpec(PRETRAINING[spec.target], kwargs),
            "loss": TableLoss(plan.kind.num_numbers, plan.kind.cardinalities),
            "transformBatch": Corruption(roles=("numbers", "ids"), mask=mask),
        }

    def _check_free(self, mask: float | None) -> None:
        """Raises ValueError if a loss or metrics are set too; they would need a target for each value."""
        if self.isSet(self.loss):
            raise ValueError(f"mask={mask} sets a loss that compares only masked values; leave loss unset")
        if self.getMetrics():
            raise ValueError(
                f"mask={mask} leaves most values without a target, and metrics cannot skip values; leave "
                "metrics unset, the loss is in the history"
            )


def _roles(kind: Kind | None, name: str) -> Sequence[Role]:
    if isinstance(kind, Tokens):
        return ("value", "valid")
    others: list[Role] = ["other"] * (0 if kind is None else len(kind.arguments(name)) - 1)
    return ("value", *others)


def _mask_id(kinds: Sequence[Kind | None]) -> int | None:
    """Returns the id of the mask token of the first tokenizer, or the id after its last one; None if none."""
    for kind in kinds:
        if isinstance(kind, Tokens):
            vocabulary: dict[str, int] = json.loads(kind.tokenizer)["model"].get("vocab", {})
            added = {token["content"]: token["id"] for token in json.loads(kind.tokenizer)["added_tokens"]}
            known = added | (vocabulary if isinstance(vocabulary, dict) else {})
            return next((known[token] for token in ("[MASK]", "<mask>") if token in known), kind.num_ids)
    return None
