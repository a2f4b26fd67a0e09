"""From a Spark DataFrame to a trained PyTorch network and back to a DataFrame of predictions."""

from __future__ import annotations

from pathlib import Path as _Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ringspark.extras.functions.run_function import run as run

__version__ = "0.1.0"

_FOLDER = _Path(__file__).resolve().parent
if (_FOLDER.parent / "pyproject.toml").exists() and (_FOLDER.parent / "pipelines").is_dir():
    # In a checkout, the packages lie next to this folder.
    __path__.append(str(_FOLDER.parent))


def __getattr__(name: str) -> Any:
    # On first use, because it imports Spark and torch.
    if name == "run":
        from ringspark.extras.functions.run_function import run

        return run
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), "run"]
