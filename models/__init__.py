"""Plain `nn.Module` networks, `ModelSpec` and activation checkpointing.

Nothing here imports Spark or Arrow.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ringspark.models.activation_checkpoint import apply_activation_checkpoint
from ringspark.models.augmentation import RandomCrop, RandomHorizontalFlip
from ringspark.models.chain import Link
from ringspark.models.linear import Linear
from ringspark.models.mlp import MLP
from ringspark.models.recurrent import Recurrent
from ringspark.models.registry import MODELS
from ringspark.models.reports import CountingLayer, add_counts, add_loss
from ringspark.models.resnet import ResNet
from ringspark.models.spec import ModelSpec
from ringspark.models.tabular import TabularNet
from ringspark.models.tabular_ensemble import TabularEnsemble
from ringspark.models.transformer import TransformerClassifier, TransformerLM

if TYPE_CHECKING:
    from ringspark.extras.experts.layer import MixtureOfExperts as MixtureOfExperts

__all__ = [
    "MLP",
    "MODELS",
    "CountingLayer",
    "Linear",
    "Link",
    "MixtureOfExperts",
    "ModelSpec",
    "RandomCrop",
    "RandomHorizontalFlip",
    "Recurrent",
    "ResNet",
    "TabularEnsemble",
    "TabularNet",
    "TransformerClassifier",
    "TransformerLM",
    "add_counts",
    "add_loss",
    "apply_activation_checkpoint",
]


def __getattr__(name: str) -> Any:
    if name == "MixtureOfExperts":
        return import_module("ringspark.extras.experts.layer").MixtureOfExperts
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
