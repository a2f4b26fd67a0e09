"""Plain `nn.Module` networks, `ModelSpec` and activation checkpointing.

Nothing here imports Spark or Arrow.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ringspark.models.activation_checkpoint import apply_activation_checkpoint
from ringspark.models.chain import Link
from ringspark.models.linear import Linear
from ringspark.models.mlp import MLP
from ringspark.models.registry import MODELS
from ringspark.models.reports import CountingLayer, add_counts, add_loss
from ringspark.models.spec import ModelSpec
from ringspark.models.transformer import TransformerClassifier, TransformerLM

if TYPE_CHECKING:
    from ringspark.extras.augmentation import RandomCrop as RandomCrop
    from ringspark.extras.augmentation import RandomHorizontalFlip as RandomHorizontalFlip
    from ringspark.extras.experts.layer import MixtureOfExperts as MixtureOfExperts
    from ringspark.extras.networks.recurrent import Recurrent as Recurrent
    from ringspark.extras.networks.resnet import ResNet as ResNet
    from ringspark.extras.tables.tabular import TabularNet as TabularNet
    from ringspark.extras.tables.tabular_ensemble import TabularEnsemble as TabularEnsemble

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


# Public names of ringspark.extras -> their modules.
_EXTRAS = {
    "MixtureOfExperts": "experts.layer",
    "RandomCrop": "augmentation",
    "RandomHorizontalFlip": "augmentation",
    "Recurrent": "networks.recurrent",
    "ResNet": "networks.resnet",
    "TabularEnsemble": "tables.tabular_ensemble",
    "TabularNet": "tables.tabular",
}


def __getattr__(name: str) -> Any:
    if name in _EXTRAS:
        return getattr(import_module(f"ringspark.extras.{_EXTRAS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
