"""Spark without compiled plans, because tables of tests are small."""

from collections.abc import Iterator
from typing import Any

import pytest
from awkward_tables import interpreted


@pytest.fixture(scope="module")
def interpreter(spark: Any) -> Iterator[None]:
    with interpreted(spark):
        yield
