"""Trains a `keras.Model` of the torch backend: `model=keras_model`. Registered in `ringspark.models.adapters`."""

from ringspark.extras.keras_models.adapt import adapt
from ringspark.extras.keras_models.network import KerasNetwork, build

__all__ = ["KerasNetwork", "adapt", "build"]
