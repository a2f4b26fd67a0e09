"""Trains a `keras.Model` of the torch backend. `ringspark.models.adapters` has the import path."""

from ringspark.extras.keras_models.adapt import adapt
from ringspark.extras.keras_models.network import KerasNetwork, build

__all__ = ["KerasNetwork", "adapt", "build"]
