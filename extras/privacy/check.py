"""Checks of a private training on the driver. They refuse whatever would publish rows without noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from ringspark.estimators import run_layout
from ringspark.estimators.stages.persistence import DESCRIPTION
from ringspark.estimators.training.arguments import read_layout
from ringspark.estimators.training.check.probe import PROBE_ROWS, samples
from ringspark.estimators.training.feed import Batch, zeros
from ringspark.estimators.training.finetuning.pretrained import find_files
from ringspark.estimators.training.objective.criterion import Criterion
from ringspark.estimators.training.objective.heads import Head
from ringspark.estimators.training.precision import LossScaler
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.estimators.training.step import Recipe
from ringspark.extras.privacy.poisson_reader import plan_poisson
from ringspark.extras.privacy.row_gradients import RowGradients
from ringspark.pipelines import ShardManifest, storage
from ringspark.pipelines.kinds import Kind, Padded, Vocabulary
from ringspark.pipelines.typed_json import parse_object

_BATCH_NORM = (nn.modules.batchnorm._BatchNorm,)


def refuse_many(estimator: Any, what: str) -> None:
    """Raises ValueError if `what` would train an estimator with the setting `privacy` several times."""
    if estimator.hasParam("privacy") and estimator.getPrivacy() is not None:
        raise ValueError(
            f"privacy covers one training, but {what} publishes results of many on the same rows; fit each "
            "setting on its own, and add up the epsilons of the models"
        )


def check_private_estimator(estimator: Any, *, is_table: bool) -> None:
    """Raises ValueError for a fit that computes statistics of the training rows, before it reads any row.

    `is_table` tells whether the fit completes a network for tables.
    """
    check_installed()
    if is_table:
        raise ValueError(
            "privacy does not cover quantiles, categories and target statistics, which a network for tables "
            "takes from all rows; give model a network of your own, and encode columns by public numbers"
        )
    fraction = estimator.getValidationFraction()
    if fraction is not None:
        raise ValueError(
            f"privacy protects training rows only, and validationFraction={fraction} would take validation "
            "rows from the same people and publish their exact loss; use validationIndicatorCol "
            "for rows that need no protection, or evaluate the model on other rows"
        )


def check_private_fit(objects: UserObjects, kinds: Mapping[str, Kind]) -> None:
    """Raises ValueError for functions and column types whose results depend on several rows."""
    check_objects(objects)
    for name, kind in kinds.items():
        if isinstance(kind, Vocabulary) and kind.words is None:
            raise ValueError(
                f"privacy does not cover the words of column {name!r}, which a Vocabulary would take from "
                f"all rows; set columns={{{name!r}: Vocabulary(words=[...])}} of public words, or HashBuckets"
            )
        if isinstance(kind, Padded) and kind.length is None:
            raise ValueError(
                f"privacy does not cover the longest array of column {name!r}, which Padded() would take "
                "from all rows; set Padded(length=...)"
            )


def check_installed() -> None:
    if find_spec("opacus") is None:
        raise ValueError("privacy needs opacus; pip install 'ringspark[privacy]'")


def check_objects(objects: UserObjects) -> None:
    if objects.transform_batch is not None:
        raise ValueError(
            "privacy computes each row alone, but transformBatch can mix the rows of a batch; transform the "
            "rows before fit, or inside the network"
        )


def check_private_training(
    config: TrainConfig,
    objects: UserObjects,
    manifest: ShardManifest,
    heads: Sequence[Head],
    module: nn.Module,
    num_steps: int,
) -> None:
    """Raises ValueError if the network mixes rows, or the promised epsilon cannot be kept."""
    from ringspark.extras.privacy.ledger import find_noise_multiplier  # imports opacus, which may be missing

    check_installed()
    check_objects(objects)
    privacy = config.privacy
    assert privacy is not None
    for name, layer in module.named_modules():
        if isinstance(layer, _BATCH_NORM):
            raise ValueError(
                f"privacy computes each row alone, but {type(layer).__name__} {name!r} takes means over a "
                "batch and stores them; use GroupNorm or LayerNorm"
            )
    for column in map(manifest.column_of, config.columns):
        if getattr(column.kind, "padding", None) == "longest":
            raise ValueError(
                f"privacy computes each row alone, but Tokens of column {column.name!r} pads rows to the "
                "longest of their batch; set padding='max_length'"
            )
    if read_layout(manifest, config.input_columns):
        raise ValueError(
            "privacy samples rows of one size, but some inputs are arrays of any length; give "
            "these columns Padded(length=...)"
        )
    plan = plan_poisson(manifest.select("train").num_rows, config.batch_size)
    if privacy.delta >= 1 / plan.num_rows:
        raise ValueError(
            f"privacy's delta must be below 1 / rows ({1 / plan.num_rows:.2g}), because delta = 1 / rows "
            f"allows a training to publish one row, got {privacy.delta:g}; lower delta"
        )
    if config.pretrained is not None and not config.charged_before:
        _refuse_private_weights(config.pretrained.uri)
    _try_rows(config, manifest, heads, module)
    find_noise_multiplier(privacy, plan.sample_rate, num_steps, config.charged_before)


def _refuse_private_weights(uri: str) -> None:
    """Raises ValueError for weights of a private run or of its saved model, whose steps would not count."""
    for file in find_files(uri):
        folder = file
        for _ in range(3):  # checkpoints/step-N in the run's folder is the deepest
            folder = folder.rpartition("/")[0]
            if storage.exists(storage.join(folder, run_layout.PRIVACY)) or _is_private_model(folder):
                raise ValueError(
                    f"pretrained {storage.redact(uri)!r} holds weights of a private training, whose steps "
                    "would not count; set initialModel to its model, which adds them"
                )


def _is_private_model(folder: str) -> bool:
    try:
        described = parse_object(storage.read_bytes(storage.join(folder, DESCRIPTION)), allow_nan=True)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    return bool((described.get("summary") or {}).get("privacy"))


def _try_rows(config: TrainConfig, manifest: ShardManifest, heads: Sequence[Head], module: nn.Module) -> None:
    """Computes gradients of sample rows, to raise errors here and to find layers that keep state."""
    assert config.privacy is not None
    device, name = torch.device("cpu"), type(module).__name__
    recipe = Recipe(
        config=config, criterion=Criterion(heads, device), scaler=LossScaler("fp32", device), device=device
    )
    rows = RowGradients(recipe, module, config.privacy.max_grad_norm, PROBE_ROWS)
    batch = Batch(
        inputs=samples(config.input_columns, manifest),
        labels=tuple(zeros(manifest.array(head.label), PROBE_ROWS) for head in heads),
        weight=None,
    )
    versions = {key: parameter._version for key, parameter in module.named_parameters()}
    try:
        rows.add(batch, rows.zeros())
    except Exception as error:
        raise ValueError(
            f"privacy needs the gradient of each row, but model {name} cannot run a single row: "
            f"{type(error).__name__}: {error}; use layers that need no other rows"
        ) from error
    if (leaf := rows.find_other_leaf(batch)) is not None:
        named = [repr(key) for key, p in module.named_parameters() if p is leaf]
        what = named[0] if named else f"of shape {tuple(leaf.shape)}"
        raise ValueError(
            f"privacy needs the gradient of each row, but forward of model {name} reads the weights {what} "
            "from a list, a closure or another object; read them as attributes of the module, such as "
            "self.layer"
        )
    if rows.changed_buffers:
        raise ValueError(
            "privacy bounds gradients only, but the rows also change the buffer "
            f"{min(rows.changed_buffers)!r} of model {name}; use layers without running statistics, such as "
            "LayerNorm"
        )
    if changed := [key for key, p in module.named_parameters() if p._version != versions[key]]:
        raise ValueError(
            f"privacy bounds gradients only, but the forward pass of model {name} changes the weights "
            f"{changed[0]!r} of single rows, as an Embedding with max_norm does; leave max_norm out"
        )
    if rows.has_layer_losses:
        raise ValueError(
            f"privacy bounds the loss of each row alone, but layers of model {name} add losses by add_loss; "
            "leave add_loss out"
        )
