"""Gives a GPU's memory back at the end of a task, because Spark keeps its Python worker for other tasks."""

from __future__ import annotations

import gc
from contextlib import suppress

import torch


def release_gpu() -> None:
    """Frees tensors that only cycles of references hold, and torch's cache; CUDA's own context stays.

    Without CUDA in this process it does nothing.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        gc.collect()
        # After an error of the device every call of CUDA raises, and that error matters more than this one.
        with suppress(RuntimeError):
            torch.cuda.empty_cache()
