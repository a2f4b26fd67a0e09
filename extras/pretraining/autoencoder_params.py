"""The Params of `TorchAutoencoder` that other estimators do not have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Lt

from ringspark.estimators.options.checked import NotNegative
from ringspark.estimators.stages.declared import DeclaredParams, with_settings
from ringspark.estimators.training.settings.setting import Section, setting, settings_of


@dataclass(frozen=True, kw_only=True)
class Pretraining(Section):
    GROUP = "pretraining"
    ON_DRIVER = True

    noise: Annotated[float, Ge(0)] = setting(
        0.0, "standard deviation of Gaussian noise that is added to numeric inputs during training; 0: none"
    )
    mask: Annotated[float, Ge(0), Lt(1)] | None = setting(
        None,
        "share of the inputs that are masked and that the loss compares; unset: 0, or 0.3 without a model",
    )
    mask_value: float | tuple[float, ...] | None = setting(
        None,
        "number that replaces a masked number, or a list with one per number; unset: 0",
    )
    mask_id: NotNegative | None = setting(
        None, "id that replaces a masked id; unset: the tokenizer's mask token, or the id after its last one"
    )


@with_settings(*settings_of(Pretraining).values())
class AutoencoderParams(DeclaredParams):
    """The Params of `TorchAutoencoder` alone."""
