"""Predicts rows of a pandas DataFrame like `transform`, without ringspark, Spark and pickle.

A logged model contains a copy of this package, named `ringspark_served`, with copies of the modules of
ringspark that it imports. They import NumPy, pandas, pyarrow, the package that runs the network, and those
that a column needs (`Kind.packages`). The model's folder contains `serving.json` for pre- and postprocessing,
and the network as `network.onnx`, or as `network.json` and `network.safetensors`.
"""

from __future__ import annotations

from .served import ServedModel

__all__ = ["ServedModel", "load"]


def load(folder: str) -> ServedModel:
    """Loads the model of a folder that holds `serving.json`."""
    return ServedModel.load(folder)


_load_pyfunc = load  # MLflow calls this function by its name
