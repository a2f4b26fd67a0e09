"""Tests here need a CUDA device; `RINGSPARK_TEST_DEVICE=cpu` runs those that a CPU can run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

DEVICE = os.environ.get("RINGSPARK_TEST_DEVICE", "cuda:0")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    is_missing = DEVICE != "cpu" and not torch.cuda.is_available()
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if is_missing:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def device() -> str:
    return DEVICE


@pytest.fixture(autouse=True)
def exact_products() -> None:
    """TF32 rounds fp32 products to 10 bits, and some images of containers switch it on by a variable."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
