"""Imports the part of `ringspark.extras` that reads external tables in place, at the first use of it."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def in_place(module: str) -> Any:
    """Returns a module of `ringspark.extras.external_tables.in_place`."""
    return import_module(f"ringspark.extras.external_tables.in_place.{module}")
