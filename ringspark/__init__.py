"""From a Spark DataFrame to a trained PyTorch network and back to a DataFrame of predictions."""

from __future__ import annotations

from pathlib import Path as _Path

__version__ = "0.1.0"

_FOLDER = _Path(__file__).resolve().parent
if (_FOLDER.parent / "pyproject.toml").exists() and (_FOLDER.parent / "pipelines").is_dir():
    # In a checkout, the packages lie next to this folder.
    __path__.append(str(_FOLDER.parent))
