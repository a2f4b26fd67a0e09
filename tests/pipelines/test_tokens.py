"""`Tokens.of` accepts every form of a tokenizer; texts become ids and a mask. No test here needs Spark."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from ringspark.pipelines import Tokens
from ringspark.pipelines.kinds import kind_from_json
from ringspark.pipelines.rows import RaggedRows

WORDS = {"?": 0, "<": 1, ">": 2, "a": 3, "b": 4, "c": 5, "[PAD]": 6}


def words() -> Tokenizer:
    """A whole-word tokenizer with unknown, start and end tokens."""
    made = Tokenizer(models.WordLevel(WORDS, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.post_processor = processors.BertProcessing((">", 2), ("<", 1))
    return made


def batch(kind: Tokens, *texts: str) -> dict[str, Any]:
    rows = kind.decode(kind.encode(pa.array(texts, pa.string())).arrays)
    assert isinstance(rows, RaggedRows)
    return kind.finish("x", rows)


def test_a_batch_is_as_long_as_its_longest_text_and_at_least_one() -> None:
    kind = Tokens.of(words(), 4)
    found = batch(kind, "a", "b never c", "")
    assert found["x.ids"].tolist() == [[1, 3, 2, 6], [1, 4, 0, 2], [1, 2, 6, 6]]
    assert found["x.mask"].sum(1).tolist() == [3, 4, 2]
    bare = words()
    bare.post_processor = None
    empty = batch(Tokens.of(bare, 4), "", "")
    assert (empty["x.ids"].tolist(), empty["x.mask"].any()) == ([[6], [6]], False)
    # A worker without rows in a step gets such a batch.
    none = batch(kind)
    assert none["x.ids"].shape == none["x.mask"].shape == (0, 1)
    assert batch(Tokens.of(words(), 6, padding="max_length"), "a")["x.ids"].shape == (1, 6)
    assert batch(Tokens.of(words(), 4, too_long="refuse"), "b c")["x.ids"].shape == (1, 4)


def test_every_form_of_a_tokenizer_gives_the_same_ids(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(tokenizer_object=words(), pad_token="[PAD]", model_max_length=4)
    fast.save_pretrained(str(tmp_path / "folder"))
    fast("a b c", truncation=True, max_length=3)  # the tokenizer keeps this; Tokens must ignore it
    words().save(str(tmp_path / "tokenizer.json"))
    kinds = [
        Tokens.of(words(), 4),
        Tokens.of(words().to_str(), 4),
        Tokens.of(tmp_path / "tokenizer.json", 4),
        Tokens.of(fast),
        Tokens.of(str(tmp_path / "folder")),
    ]
    wanted = batch(kinds[0], "a b c", "a")["x.ids"].tolist()
    assert wanted == [[1, 3, 4, 2], [1, 3, 2, 6]]
    for kind in kinds:
        assert (kind.max_length, kind.pad_id, kind.num_ids) == (4, 6, 7)
        again = kind_from_json(json.loads(json.dumps(kind.to_json())))
        assert again == kind
        assert isinstance(again, Tokens)
        assert batch(again, "a b c", "a")["x.ids"].tolist() == wanted
        assert len(repr(kind)) < 120


def test_a_tokenizers_own_bound_side_and_padding_are_kept() -> None:
    from transformers import PreTrainedTokenizerFast

    own = words()
    own.enable_truncation(4, direction="left")
    own.enable_padding(length=9, pad_id=5, pad_token="c")
    kind = Tokens.of(own)
    assert batch(kind, "a b c", "a")["x.ids"].tolist() == [[1, 4, 5, 2], [1, 3, 2, 5]]
    own.enable_padding(direction="left", pad_id=5, pad_token="c")
    fast = PreTrainedTokenizerFast(tokenizer_object=words(), pad_token="c", padding_side="left")
    for left in (own, fast):
        with pytest.warns(UserWarning, match="at the start, but Tokens pads .*; use the mask"):
            kind = Tokens.of(left, 4)
        assert batch(kind, "b c", "a")["x.ids"].tolist() == [[1, 4, 5, 2], [1, 3, 2, 5]]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Tokens.of(3), "got int"),
        (lambda: Tokens("tokenizer.json", 4), "must be the JSON text .*; pass files and objects to"),
        (lambda: Tokens.of(words(), 0), "max_length of Tokens must be a whole number of at least 1, got 0"),
        (lambda: Tokens.of(words(), "4"), "at least 1, got '4'"),
        (lambda: Tokens.of(words(), 4, padding="batch"), "padding of Tokens must be 'longest' or"),
        (lambda: batch(Tokens.of(words(), 4, too_long="refuse"), "a b c"), "a text of 5 tokens, but max"),
        (
            lambda: batch(Tokens.of(Tokenizer(models.WordLevel({"a": 0}, unk_token="?")), 4), "b"),
            "holds a text that its tokenizer cannot read",
        ),
    ],
)
def test_what_cannot_be_tokenized_is_told(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_missing_package_is_named_with_its_extra() -> None:
    code = (
        "import sys; sys.modules['tokenizers'] = None\n"
        "from ringspark.pipelines import Tokens\n"
        "try: Tokens.of('{}', 4)\n"
        "except ValueError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "texts need the package tokenizers; pip install 'ringspark[text]'\n"


@pytest.mark.extras
@pytest.mark.spark
def test_a_tokenizer_is_learnt_from_some_texts_whatever_their_order(spark: Any) -> None:
    from ringspark.pipelines import train_tokenizer

    texts = [f"Hello wörld {i % 7}" for i in range(50)] + [None, "", "x" * 10_000]
    frame = spark.createDataFrame([(text,) for text in texts], "`a.text` string")
    made = train_tokenizer(frame.repartition(3), "a.text", vocab_size=300)
    assert made.to_str() == train_tokenizer(frame.coalesce(1), "a.text", vocab_size=300).to_str()
    assert made.token_to_id("[PAD]") == 0
    # No text is unknown; each decodes to itself in lower case.
    encoded = made.encode("日本 Hello")
    assert made.decode(encoded.ids).strip() == "日本 hello"
    kind = Tokens.of(made, 64)
    assert kind.num_ids == made.get_vocab_size() <= 300
    assert np.issubdtype(batch(kind, "hello")["x.ids"].dtype, np.int64)
    # Frequent and empty texts do not displace other texts in the sample.
    mostly = spark.createDataFrame([(text,) for text in ["", "none"] * 30 + ["one two", "three"]], "t string")
    few = train_tokenizer(mostly, "t", vocab_size=300, rows=3)
    assert len(few.encode("three").ids) == 1
    with pytest.raises(ValueError, match="vocab_size must be at least 257"):
        train_tokenizer(frame, "a.text", vocab_size=10)
