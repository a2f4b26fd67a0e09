"""Hyperparameters of the flights example, all chosen by the score on the validation month.

A random search chose the settings of gradient boosting, which is the baseline.
"""

from __future__ import annotations

# The folder of all results.
DEFAULT_ROOT = "artifacts/flights"

# The network for tables: fewer epochs and narrower embeddings than by default, because later months differ.
EPOCHS, BATCH_SIZE, LEARNING_RATE, WIDTH = 2, 1_024, 2e-3, 4

# Arguments of scikit-learn's `HistGradientBoostingClassifier`.
BOOSTING = {
    "max_iter": 450,
    "learning_rate": 0.05,
    "max_leaf_nodes": 31,
    "min_samples_leaf": 20,
    "l2_regularization": 10.0,
    "max_features": 0.3,
}
