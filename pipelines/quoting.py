"""Names of columns in SQL."""

from __future__ import annotations


def quote(name: str) -> str:
    """Quotes a column name for Spark, which would read a dot in it as access to a struct field."""
    return "`" + name.replace("`", "``") + "`"
