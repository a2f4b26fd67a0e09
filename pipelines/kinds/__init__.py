"""Column types: `Kind` is their base class, and `KINDS` lists all of them.

To add a column type, write a subclass of `Kind`, list it in `KINDS`, and add an example to
tests/pipelines/test_kinds.py.
"""

from __future__ import annotations

from typing import Any

from ringspark.pipelines.kinds.array import Array
from ringspark.pipelines.kinds.base import BatchArray, Encoded, Kind
from ringspark.pipelines.kinds.binary import DECODERS, Binary
from ringspark.pipelines.kinds.image import Image
from ringspark.pipelines.kinds.ragged import Padded, Ragged
from ringspark.pipelines.kinds.scalar import Scalar
from ringspark.pipelines.kinds.sparse import Sparse
from ringspark.pipelines.kinds.strings import HashBuckets, Vocabulary
from ringspark.pipelines.kinds.structs import Struct
from ringspark.pipelines.kinds.table_row import TableColumn, TableRow
from ringspark.pipelines.kinds.tokens import Tokens
from ringspark.pipelines.kinds.vector import Vector
from ringspark.pipelines.typed_json import record

KINDS: dict[str, type[Kind]] = {
    kind.tag: kind
    for kind in (
        *(Scalar, Array, Ragged, Padded, Vector, Struct),
        *(Sparse, Vocabulary, HashBuckets, Tokens, Binary, Image, TableRow),
    )
}
"""Class of each column type, by its tag in the manifest."""

__all__ = [
    "DECODERS",
    "KINDS",
    "Array",
    "BatchArray",
    "Binary",
    "Encoded",
    "HashBuckets",
    "Image",
    "Kind",
    "Padded",
    "Ragged",
    "Scalar",
    "Sparse",
    "Struct",
    "TableColumn",
    "TableRow",
    "Tokens",
    "Vector",
    "Vocabulary",
    "kind_from_json",
]


def kind_from_json(data: dict[str, Any]) -> Kind:
    fields = dict(data)
    tag = fields.pop("kind", None)
    if not isinstance(tag, str) or tag not in KINDS:
        raise ValueError(f"a column has unknown type {tag!r}; known: {', '.join(KINDS)}; upgrade ringspark")
    return record(KINDS[tag], fields)
