"""Hyperparameters of the flights example, for two networks and for gradient boosting as the baseline.

All were chosen by the score on the validation month: `NetworkRecipe` and `BoostingRecipe` by random searches
of about equal time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ringspark.models import ModelSpec


# The folder of all results.
DEFAULT_ROOT = "artifacts/flights"

# The network for tables: fewer epochs and narrower embeddings than by default, because later months differ.
EPOCHS, BATCH_SIZE, LEARNING_RATE, WIDTH = 2, 1_024, 2e-3, 4


@dataclass(frozen=True, kw_only=True)
class NetworkRecipe:
    """The entity-embedding network, trained by AdamW with a one-cycle schedule."""

    hidden: tuple[int, ...] = (128, 64)
    dropout: float = 0.4
    embedding_dropout: float = 0.3
    epochs: int = 3
    learning_rate: float = 3e-3
    weight_decay: float = 1e-2

    def spec(self, members: int, cardinalities: Sequence[int], num_numeric: int) -> ModelSpec:
        from ringspark.models import ModelSpec

        return ModelSpec(
            "tabular_ensemble",
            {
                "members": members,
                "cardinalities": list(cardinalities),
                "num_numeric": num_numeric,
                "hidden": list(self.hidden),
                "out_features": 1,
                "dropout": self.dropout,
                "embedding_dropout": self.embedding_dropout,
            },
        )


@dataclass(frozen=True, kw_only=True)
class BoostingRecipe:
    """Arguments of scikit-learn's `HistGradientBoostingClassifier`."""

    max_iter: int = 450
    learning_rate: float = 0.05
    max_leaf_nodes: int = 31
    min_samples_leaf: int = 20
    l2_regularization: float = 10.0
    max_features: float = 0.3


NETWORK = NetworkRecipe()
BOOSTING = BoostingRecipe()
