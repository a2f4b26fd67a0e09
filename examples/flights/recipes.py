"""The folder of all results, and the baseline's settings, which a random search chose on month 9."""

from __future__ import annotations

DEFAULT_ROOT = "artifacts/flights"

# Arguments of scikit-learn's `HistGradientBoostingClassifier`.
BOOSTING = {
    "max_iter": 450,
    "learning_rate": 0.05,
    "max_leaf_nodes": 31,
    "min_samples_leaf": 20,
    "l2_regularization": 10.0,
    "max_features": 0.3,
}
