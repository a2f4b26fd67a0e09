"""Gives a GPU's memory back at the end of a task, because Spark keeps its Python worker for other tasks."""

from __future__ import annotations

import gc

import torch


def release_gpu() -> None:
    """Frees tensors that only cycles of references hold, and torch's cache; CUDA's own context stays.

    Without CUDA in this process it does nothing.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        gc.collect()
        torch.cuda.empty_cache()
