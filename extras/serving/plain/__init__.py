"""Predicts rows of pandas as `transform` does, without ringspark, Spark and pickle.

A logged model carries a copy of this package, `ringspark_served`, so it imports itself relatively.
Besides, it imports NumPy, pandas and the package that runs the network. The folder of a model holds
`serving.json`, the pre- and postprocessing, and the network as `network.onnx` or `network.json`.
"""

from __future__ import annotations

from .served import ServedModel

__all__ = ["ServedModel", "load"]


def load(folder: str) -> ServedModel:
    """Loads the model of a folder that holds `serving.json`."""
    return ServedModel.load(folder)


def _load_pyfunc(folder: str) -> ServedModel:
    """Loads the model; MLflow calls this function by its name."""
    return load(folder)
