"""Plain `nn.Module` networks, `ModelSpec` and activation checkpointing.

Nothing here imports Spark or Arrow.
"""

from typing import TYPE_CHECKING

from ringspark.lazy_names import export_lazily

if TYPE_CHECKING:
    from ringspark.extras.augmentation import RandomCrop as RandomCrop
    from ringspark.extras.augmentation import RandomHorizontalFlip as RandomHorizontalFlip
    from ringspark.extras.experts.layer import MixtureOfExperts as MixtureOfExperts
    from ringspark.extras.networks.recurrent import Recurrent as Recurrent
    from ringspark.extras.networks.resnet import ResNet as ResNet
    from ringspark.extras.tables.tabular import TabularEnsemble as TabularEnsemble
    from ringspark.extras.tables.tabular import TabularNet as TabularNet
    from ringspark.models.activation_checkpoint import (
        apply_activation_checkpoint as apply_activation_checkpoint,
    )
    from ringspark.models.chain import Link as Link
    from ringspark.models.mlp import MLP as MLP
    from ringspark.models.mlp import Linear as Linear
    from ringspark.models.registry import MODELS as MODELS
    from ringspark.models.reports import CountingLayer as CountingLayer
    from ringspark.models.reports import add_counts as add_counts
    from ringspark.models.reports import add_loss as add_loss
    from ringspark.models.spec import ModelSpec as ModelSpec
    from ringspark.models.transformer import TransformerClassifier as TransformerClassifier
    from ringspark.models.transformer import TransformerLM as TransformerLM

__getattr__, __dir__, __all__ = export_lazily(__name__)
