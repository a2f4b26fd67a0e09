"""Column types: `Kind` is their base class, and `KINDS` lists all of them.

To add a column type, write a subclass of `Kind`, list it in `KINDS`, and add an example to
tests/pipelines/test_kinds.py.
"""

from __future__ import annotations

from typing import Any

from ringspark.pipelines.kinds.array import Array as Array
from ringspark.pipelines.kinds.base import Kind as Kind
from ringspark.pipelines.kinds.binary import Binary as Binary
from ringspark.pipelines.kinds.image import Image as Image
from ringspark.pipelines.kinds.ragged import Padded as Padded
from ringspark.pipelines.kinds.ragged import Ragged as Ragged
from ringspark.pipelines.kinds.scalar import Scalar as Scalar
from ringspark.pipelines.kinds.sparse import Sparse as Sparse
from ringspark.pipelines.kinds.strings import HashBuckets as HashBuckets
from ringspark.pipelines.kinds.strings import Vocabulary as Vocabulary
from ringspark.pipelines.kinds.structs import Struct as Struct
from ringspark.pipelines.kinds.table_row import TableColumn as TableColumn
from ringspark.pipelines.kinds.table_row import TableRow as TableRow
from ringspark.pipelines.kinds.tokens import Tokens as Tokens
from ringspark.pipelines.kinds.vector import Vector as Vector
from ringspark.pipelines.typed_json import record

KINDS: dict[str, type[Kind]] = {
    kind.tag: kind
    for kind in (
        *(Scalar, Array, Ragged, Padded, Vector, Struct),
        *(Sparse, Vocabulary, HashBuckets, Tokens, Binary, Image, TableRow),
    )
}
"""Class of each column type, by its tag in the manifest."""


def kind_from_json(data: dict[str, Any]) -> Kind:
    fields = dict(data)
    tag = fields.pop("kind", None)
    if not isinstance(tag, str) or tag not in KINDS:
        raise ValueError(f"a column has unknown type {tag!r}; known: {', '.join(KINDS)}; upgrade ringspark")
    return record(KINDS[tag], fields)
