"""A text classification data set: the docstrings of Python's standard library, labelled by package."""

from __future__ import annotations

import ast
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# Tests and installed packages.
_SKIPPED = {"test", "tests", "site-packages", "dist-packages"}
_MIN_WORDS = 5


def frame(spark: SparkSession, packages: int) -> DataFrame:
    """Returns `package` and `text`: docstrings of the largest packages, in a fixed order."""
    owners: dict[str, str | None] = {}
    for package, text in _docstrings(Path(sysconfig.get_paths()["stdlib"])):
        # A text of two packages has no label.
        owners[text] = package if owners.get(text, package) == package else None
    found = [(package, text) for text, package in owners.items() if package is not None]
    largest = {name for name, _ in Counter(package for package, _ in found).most_common(packages)}
    rows = [(package, text) for package, text in found if package in largest]
    return spark.createDataFrame(rows, "package string, text string").coalesce(2)


def _docstrings(root: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        package = parts[0].removesuffix(".py")
        # Private modules belong to public packages.
        if _SKIPPED.intersection(parts) or package.startswith("_"):
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):  # templates of other versions of Python
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text is not None and len(text.split()) >= _MIN_WORDS:
                    yield package, text
