"""Column type "tokens": the write converts texts to token ids, and the reader pads the rows of a batch.

The tokenizer is stored as JSON of the `tokenizers` package. Shards and saved models therefore need no other
file, and nothing is unpickled.
"""

from __future__ import annotations

import json
import os
import warnings
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import numpy as np

from ringspark.pipelines.kinds.base import (
    BatchArray,
    Encoded,
    Kind,
    Shape,
    decode_lists,
    list_type,
    make_lists,
    range_of,
)
from ringspark.pipelines.kinds.strings import check_string
from ringspark.pipelines.kinds.values import to_texts
from ringspark.pipelines.rows import NumpyArray, RaggedRows, Rows

if TYPE_CHECKING:
    from pyspark.sql import Column as SparkColumn
    from pyspark.sql.types import DataType
    from typing_extensions import Self

Padding = Literal["longest", "max_length"]
TooLong = Literal["cut", "refuse"]

# transformers writes 10^30 for a tokenizer without a limit.
_NO_BOUND = 1 << 31


@dataclass(frozen=True, repr=False)
class Tokens(Kind):
    """Texts as token ids; a batch holds `name.ids` (int64) and `name.mask` (bool), both (rows, length).

    The mask is true for tokens and false for the padding at the end of a row. `Tokens.of` accepts any form of
    tokenizer.

    Attributes:
        tokenizer: JSON text of a `tokenizers.Tokenizer`.
        max_length: Largest number of tokens per text, including special tokens.
        pad_id: Id of the padding.
        padding: "longest" pads the rows of a batch to its longest text, so the length differs between
            batches. "max_length" pads every batch to `max_length`.
        too_long: "cut" truncates a longer text as the tokenizer does: at the end by default, and special
            tokens stay. "refuse" raises an error in the write or in transform.
    """

    tag: ClassVar[str] = "tokens"
    packages = ("tokenizers",)
    request = ("str", ())
    suffixes: ClassVar[tuple[str, ...]] = (".ids", ".mask")
    tokenizer: str
    max_length: int
    pad_id: int = 0
    padding: Padding = "longest"
    too_long: TooLong = "cut"

    def __post_init__(self) -> None:
        if not isinstance(self.tokenizer, str) or not self.tokenizer.lstrip().startswith("{"):
            raise ValueError(
                "tokenizer of Tokens must be the JSON text of a tokenizer; pass files and objects to "
                "Tokens.of(tokenizer, max_length)"
            )
        if isinstance(self.max_length, bool) or not isinstance(self.max_length, int) or self.max_length < 1:
            raise ValueError(
                f"max_length of Tokens must be a whole number of at least 1, got {self.max_length!r}"
            )
        for name, known in (("padding", get_args(Padding)), ("too_long", get_args(TooLong))):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name} of Tokens must be {' or '.join(map(repr, known))}, got {getattr(self, name)!r}"
                )

    @classmethod
    def of(
        cls,
        tokenizer: Any,
        max_length: int | None = None,
        *,
        pad_id: int | None = None,
        padding: Padding = "longest",
        too_long: TooLong = "cut",
    ) -> Self:
        """Returns the column type for a tokenizer in any form. Runs on the driver.

        Args:
            tokenizer: A `tokenizers.Tokenizer`, a fast tokenizer of transformers, the path or URI of a
                tokenizer.json or of its folder, or its JSON text.
            max_length: See the class; None takes the tokenizer's own limit.
            pad_id: See the class; None takes the tokenizer's own padding id, or 0 if it has none.
            padding: See the class.
            too_long: See the class.

        Raises:
            ValueError: The value is not a tokenizer, no limit is known, or `tokenizers` is not installed.
        """
        text, settings = _read(tokenizer)
        made = _load(text)
        # In this order: a fast tokenizer leaves the limit of its last call in the wrapped tokenizer.
        own = settings.get("model_max_length"), (made.truncation or {}).get("max_length")
        bounds = [bound for bound in own if bound is not None and bound < _NO_BOUND]
        if max_length is None and not bounds:
            raise ValueError(
                "this tokenizer has no maximum length; set one, e.g. Tokens.of(tokenizer, max_length=128)"
            )
        length = bounds[0] if max_length is None else max_length
        if pad_id is None:
            names = (settings.get("pad_token"), (made.padding or {}).get("pad_token"), "[PAD]", "<pad>")
            known = [made.token_to_id(name) for name in names if name is not None]
            pad_id = next((number for number in known if number is not None), 0)
        if (settings.get("padding_side") or (made.padding or {}).get("direction")) == "left":
            warnings.warn(
                "this tokenizer pads texts at the start, but Tokens pads them at the end, so that a token's "
                "position does not depend on other texts; use the mask to find a text's last token",
                stacklevel=2,
            )
        kind = cls(text, length, pad_id, padding, too_long)
        side = settings.get("truncation_side") or (made.truncation or {}).get("direction", "right")
        made.enable_truncation(length, direction=side)
        return replace(kind, tokenizer=made.to_str())

    @property
    def num_ids(self) -> int:
        """Number of rows that an `nn.Embedding` for the ids needs."""
        ids = _encoder(self.tokenizer, None).get_vocab(with_added_tokens=True).values()
        return max(max(ids, default=0), self.pad_id) + 1

    def adopt(self, name: str, data_type: DataType) -> Self:
        check_string(type(self), name, data_type)
        tokenizer = _encoder(self.tokenizer, None)
        special = tokenizer.num_special_tokens_to_add(False)
        if self.max_length <= special:
            raise ValueError(
                f"max_length of Tokens for column {name!r} is {self.max_length}, but the tokenizer adds "
                f"{special} tokens to every text; set at least {special + 1}"
            )
        if tokenizer.id_to_token(self.pad_id) is None:
            raise ValueError(
                f"pad_id of Tokens for column {name!r} is {self.pad_id}, not an id of the tokenizer; "
                f"its ids go up to {self.num_ids - 1}"
            )
        return self

    def select(self, source: SparkColumn, data_type: DataType) -> SparkColumn:
        return source.cast("string")  # the cast drops the collation

    def read_values(self, values: Any, source: str = "", zone: str = "UTC") -> Any:
        return to_texts(values)

    def stored(self, name: str) -> dict[str, Any]:
        return {name: list_type("int32")}

    def encode(self, values: Any, valid: Any = None) -> Encoded:
        tokenizer = _encoder(self.tokenizer, self.max_length if self.too_long == "cut" else None)
        ids, offsets = array("i"), np.zeros(len(values) + 1, dtype=np.int64)
        for row, text in enumerate(values):
            if valid is None or valid[row]:
                # One text at a time: a batch would start a thread per core and hold the words of all texts.
                try:
                    found = tokenizer.encode(text.as_py()).ids
                except Exception as error:  # the package raises bare ones
                    raise ValueError(f"holds a text that its tokenizer cannot read ({error})") from None
                ids.extend(found)
            offsets[row + 1] = len(ids)
        lengths = np.diff(offsets)
        if self.too_long == "refuse" and (lengths > self.max_length).any():
            raise ValueError(
                f"holds a text of {lengths.max()} tokens, but max_length={self.max_length} is set; "
                "raise max_length, or cut longer texts with too_long='cut'"
            )
        return Encoded([make_lists(offsets, np.frombuffer(ids, np.int32), "int32")], range_of(lengths))

    def measure(self, arrays: Sequence[Any]) -> NumpyArray:
        # Statistics of the lengths are more useful than statistics of the ids.
        lengths: NumpyArray = np.diff(decode_lists(arrays[0], "int32").offsets)
        return lengths

    def settle(self, name: str, shapes: tuple[Shape, Shape] | None, nullable: bool) -> Self:
        if shapes is not None and shapes[1] == (0,):
            raise ValueError(
                f"column {name!r} holds no text that the tokenizer turns into tokens; drop it with df.drop, "
                "or use a tokenizer that was trained for these texts"
            )
        return self

    def decode(self, columns: Sequence[Any]) -> Rows:
        (column,) = columns
        return decode_lists(column, "int32")

    def finish(self, name: str, rows: RaggedRows) -> dict[str, NumpyArray]:
        compact = rows.compact()
        lengths = np.diff(compact.offsets)
        longest = self.max_length
        if self.padding == "longest":
            # At least one, because networks fail on rows of length 0.
            longest = max(1, int(lengths.max(initial=0)))
        mask = np.arange(longest) < lengths[:, None]
        ids = np.full((len(lengths), longest), self.pad_id, dtype=np.int64)
        ids[mask] = compact.parts[0]
        return {f"{name}.ids": ids, f"{name}.mask": mask}

    def arguments(self, name: str) -> tuple[str, ...]:
        return self.batch_names(name)

    def arrays(self, name: str) -> dict[str, BatchArray]:
        shape, varies = (self.max_length,), self.padding == "longest"
        return {
            f"{name}.ids": BatchArray("int64", shape, varies=varies),
            f"{name}.mask": BatchArray("bool", shape, varies=varies),
        }

    @property
    def row_bytes(self) -> int:
        return 9 * self.max_length

    def __repr__(self) -> str:
        # The JSON text would fill the screen.
        shown = [f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if f.name != "tokenizer"]
        return f"Tokens(tokenizer=<{len(self.tokenizer)} characters>, {', '.join(shown)})"

    def __str__(self) -> str:
        return f"int64[{self.max_length} tokens]"


def _read(given: Any) -> tuple[str, Mapping[str, Any]]:
    """Returns a tokenizer's JSON, and the settings that transformers keeps in a separate file."""
    backend = getattr(given, "backend_tokenizer", None)
    if backend is not None:
        names = ("pad_token", "model_max_length", "truncation_side", "padding_side")
        return backend.to_str(), {name: getattr(given, name, None) for name in names}
    if hasattr(given, "to_str"):
        return str(given.to_str()), {}
    if not isinstance(given, str | os.PathLike):
        raise ValueError(
            "Tokens.of takes a tokenizer of the package tokenizers, a fast tokenizer of transformers, or the "
            f"path of tokenizer.json, got {type(given).__name__}"
        )
    if isinstance(given, str) and given.lstrip().startswith("{"):
        return given, {}
    from ringspark.pipelines import storage  # a served model has no fsspec

    uri = storage.normalize(given)
    folder = not uri.endswith(".json")
    file = storage.join(uri, "tokenizer.json") if folder else uri
    if not storage.exists(file):
        raise ValueError(
            f"there is no {file}; pass the folder of a saved fast tokenizer, or download one first: "
            "AutoTokenizer.from_pretrained(name).save_pretrained(folder)"
        )
    config = storage.join(uri, "tokenizer_config.json")
    settings = json.loads(storage.read_bytes(config)) if folder and storage.exists(config) else {}
    if isinstance(settings.get("pad_token"), dict):  # older versions write a token with its properties
        settings["pad_token"] = settings["pad_token"].get("content")
    return storage.read_bytes(file).decode(), settings


def tokenizers_package() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise ValueError("texts need the package tokenizers; pip install 'ringspark[text]'") from None
    return tokenizers


def _load(text: str) -> Any:
    package = tokenizers_package()
    try:
        return package.Tokenizer.from_str(text)
    except Exception as error:  # the package raises bare ones
        raise ValueError(f"the tokenizer of Tokens cannot be read ({error}); save it again") from None


@lru_cache(maxsize=4)
def _encoder(text: str, max_length: int | None) -> Any:
    tokenizer = _load(text)
    side = (tokenizer.truncation or {}).get("direction", "right")
    tokenizer.no_padding()
    tokenizer.no_truncation()
    if max_length is not None:
        tokenizer.enable_truncation(max_length, direction=side)
    return tokenizer
