"""Settings of the folder for shards and runs, of the reader and its cache."""

from __future__ import annotations

from typing import Any, get_args

from ringspark.estimators.training.settings.choices import Cache
from ringspark.estimators.training.settings.declaration import Setting, listed, one_of
from ringspark.pipelines import READERS, default_engine, storage
from ringspark.pipelines.entry_points import names_in


def without_secrets(value: Any) -> str:
    """Refuses a folder's URI with credentials, because Params are saved with the stage.

    Raises:
        TypeError: The value is no string.
        ValueError: The URI holds a password or a key.
    """
    if not isinstance(value, str):
        raise TypeError(f"a folder must be given as a string, got {type(value).__name__}")
    storage.refuse_secrets(value)
    return value


STORAGE_URI = Setting[str | None](
    name="storageUri",
    words="folder that all workers reach, for shards and runs; unset: a temporary one, local masters only",
    convert=without_secrets,
    without_effect=(lambda given: given["runUri"] is not None, "runUri holds the shards and the run"),
)
READER = Setting(
    name="reader",
    field="reader",
    words="engine that reads the shards: 'petastorm', 'arrow', or one that a package declares",
    default=default_engine(),
    default_words="`'petastorm'` where installed, else `'arrow'`",
    accepts=listed(lambda: READERS, lambda: names_in("ringspark.readers")),
    may_differ_on_resume=True,
)
CACHE = Setting[Cache](
    name="cache",
    field="cache",
    words="where a worker keeps decoded rows that it reads in several epochs: 'memory', 'disk' (an unnamed "
    "temporary file), 'none', or 'auto': in memory where they take at most half of what is left, otherwise "
    "on disk by the same rule",
    default="auto",
    accepts=one_of(get_args(Cache)),
    may_differ_on_resume=True,
    without_effect=(
        lambda given: given["cache"] in ("memory", "disk") and given["epochs"] == 1,
        "one epoch reads every row once",
    ),
)
