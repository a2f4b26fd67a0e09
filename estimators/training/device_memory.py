"""Frees a GPU's memory at the end of a task, because Spark keeps its Python worker for other tasks."""

from __future__ import annotations

import gc
from contextlib import suppress

import torch


def release_gpu() -> None:
    """Frees tensors in reference cycles and torch's cache; CUDA's own context stays."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        gc.collect()
        # After a device error every CUDA call raises, and that error matters more than this one.
        with suppress(RuntimeError):
            torch.cuda.empty_cache()
