"""`train_tokenizer`: trains a tokenizer on the driver, on a sample of texts of limited size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ringspark.pipelines.columns import check_frame, quote
from ringspark.pipelines.kinds.strings import check_string
from ringspark.pipelines.kinds.tokens import Tokens, tokenizers_package

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

# Limit per text on the driver: with the default `rows`, at most 80 million characters.
SAMPLED_CHARACTERS = 4_000


def train_tokenizer(df: DataFrame, column: str, vocab_size: int = 8_000, rows: int = 20_000) -> Any:
    """Trains a byte-pair encoding over the bytes of lower-cased texts. Runs on the driver.

    Every byte has an id, so the tokenizer can encode any text. The padding "[PAD]" has id 0. The same rows
    always give the same tokenizer.

    Args:
        df: Texts to train on; pass only training rows.
        column: Name of the column of texts.
        vocab_size: Largest number of ids, at least 257.
        rows: Largest number of texts, chosen by a hash. Only the first 4,000 characters of each text are
            used.

    Returns:
        A `tokenizers.Tokenizer`, for `Tokens.of`.

    Raises:
        ValueError: The column holds no strings or no text, or `tokenizers` is not installed.
    """
    from pyspark.sql import functions as F

    package = tokenizers_package()
    check_frame(df, "train_tokenizer")
    if vocab_size < 257:
        raise ValueError(f"vocab_size must be at least 257, one id per byte, got {vocab_size}")
    source = F.col(quote(column))
    check_string(Tokens, column, df.select(source).schema.fields[0].dataType)
    texts = df.select(F.substring(source.cast("string"), 1, SAMPLED_CHARACTERS).alias("text"))
    # Each distinct text counts once: equal texts have one hash and could fill the sample.
    chosen = texts.where("text <> ''").distinct().orderBy(F.xxhash64("text"), "text").limit(rows)
    sample = [row["text"] for row in chosen.collect()]
    if not any(sample):
        raise ValueError(
            f"column {column!r} holds no text to train a tokenizer on; check the filter before it"
        )
    tokenizer = package.Tokenizer(package.models.BPE())
    tokenizer.normalizer = package.normalizers.Sequence(
        [package.normalizers.NFKC(), package.normalizers.Lowercase()]
    )
    tokenizer.pre_tokenizer = package.pre_tokenizers.ByteLevel()
    tokenizer.decoder = package.decoders.ByteLevel()
    trainer = package.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["[PAD]"],
        initial_alphabet=sorted(package.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample, trainer)
    return tokenizer
