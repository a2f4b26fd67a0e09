"""Checks of a private training on the driver, once the rows and the network are known."""

from __future__ import annotations

import torch
from torch import nn

from ringspark.estimators import run_layout
from ringspark.estimators.stages.persistence import DESCRIPTION
from ringspark.estimators.training.arguments import read_layout
from ringspark.estimators.training.check.probe import PROBE_ROWS, samples
from ringspark.estimators.training.check.training import Trial
from ringspark.estimators.training.feed import Batch, zeros
from ringspark.estimators.training.finetuning.pretrained import find_files
from ringspark.estimators.training.objective.criterion import Criterion
from ringspark.estimators.training.precision import LossScaler
from ringspark.estimators.training.step import Recipe
from ringspark.extras.privacy.poisson_reader import plan_poisson
from ringspark.extras.privacy.row_gradients import RowGradients
from ringspark.pipelines import storage
from ringspark.pipelines.typed_json import parse_object


def check_private_training(training: Trial) -> None:
    """Raises ValueError if the network mixes rows, or the promised epsilon cannot be kept."""
    from ringspark.extras.privacy.ledger import find_noise_multiplier  # imports opacus, which may be missing

    config, manifest, module = training.config, training.manifest, training.module
    privacy = config.privacy
    assert privacy is not None
    for name, layer in module.named_modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
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
    _try_rows(training)
    find_noise_multiplier(privacy, plan.sample_rate, training.num_steps, config.charged_before)


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


def _try_rows(training: Trial) -> None:
    """Computes gradients of sample rows, to raise errors here and to find layers that keep state."""
    config, heads, module = training.config, training.heads, training.module
    assert config.privacy is not None
    device, name = torch.device("cpu"), type(training.module).__name__
    recipe = Recipe(
        config=config, criterion=Criterion(heads, device), scaler=LossScaler("fp32", device), device=device
    )
    rows = RowGradients(recipe, module, config.privacy.max_grad_norm, PROBE_ROWS)
    batch = Batch(
        inputs=samples(config.input_columns, training.manifest),
        labels=tuple(zeros(training.manifest.array(head.label), PROBE_ROWS) for head in heads),
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
