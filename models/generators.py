"""A rank's random generators (of torch, NumPy and Python). Their state is saved without pickle."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

Tensors = dict[str, torch.Tensor]

# Odd numbers that keep the streams of (seed, step, rank) apart.
_STEP_FACTOR = 7_368_787
_RANK_FACTOR = 1_000_003


def get_generator_state(device: torch.device) -> tuple[Tensors, dict[str, Any]]:
    _, words, position, has_gauss, gauss = np.random.get_state()
    version, python, python_gauss = random.getstate()
    tensors = {
        "torch": torch.get_rng_state(),
        # The file format has no unsigned 32-bit integers.
        "numpy": torch.from_numpy(np.asarray(words).astype(np.int64)),
        "python": torch.tensor(python, dtype=torch.int64),
    }
    if device.type == "cuda":
        tensors["cuda"] = torch.cuda.get_rng_state(device)
    plain = {"numpy": [int(position), int(has_gauss), float(gauss)], "python": [version, python_gauss]}
    return tensors, plain


def set_generator_state(tensors: Tensors, plain: dict[str, Any], device: torch.device) -> None:
    try:
        torch.set_rng_state(tensors["torch"].clone())
        if device.type == "cuda" and "cuda" in tensors:
            torch.cuda.set_rng_state(tensors["cuda"].clone(), device)
        position, has_gauss, gauss = plain["numpy"]
        words = tensors["numpy"].numpy().astype(np.uint32)
        np.random.set_state(("MT19937", words, position, has_gauss, gauss))
        version, python_gauss = plain["python"]
        random.setstate((version, tuple(tensors["python"].tolist()), python_gauss))
    except (KeyError, TypeError, RuntimeError) as error:
        raise ValueError(f"the random state is damaged ({error}); use another checkpoint") from error


def seed_rank(seed: int, step: int, rank: int) -> None:
    """Seeds all generators of a rank before it trains from `step` on; each generator gets its own stream.

    The seed for torch at step 0 must never change, so that old trainings can be reproduced bitwise.
    """
    torch.manual_seed((seed * _RANK_FACTOR + step * _STEP_FACTOR + rank) % 2**63)
    _seed_by_name(f"{seed} {step} {rank}")


def common_seed(seed: int, step: int) -> int:
    """Returns a number for a step that is equal on all ranks."""
    return (seed * _RANK_FACTOR + step * _STEP_FACTOR) % 2**62


def seed_constructor(seed: int) -> None:
    """Seeds all generators equally on every rank, because a constructor may draw from any of them."""
    # `seed` may be any integer, but torch takes 64 bits.
    torch.manual_seed(seed % 2**63)
    _seed_by_name(f"{seed} constructor")


def _seed_by_name(name: str) -> None:
    # Hashed, because NumPy and torch draw the same numbers from the same seed.
    np.random.seed(np.frombuffer(hashlib.sha256(name.encode()).digest(), dtype=np.uint32))
    random.seed(name)


@contextmanager
def keep_shared_generators() -> Iterator[None]:
    """Restores NumPy's and Python's random state after the `with` block, for other work in the process."""
    numpy_state, python_state = np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        np.random.set_state(numpy_state)
        random.setstate(python_state)
