"""Settings of the exchange: how few bytes the gradients take on their way between the workers."""

from __future__ import annotations

from typing import Any

from ringspark.estimators.training.settings.declaration import Setting


def _compression(value: Any) -> dict[str, Any]:
    # Imported only when a value is given, because it imports torch, which `--help` does not need.
    from ringspark.estimators.collectives.compressors import resolved_compression

    return resolved_compression(value, "gradientCompression")


GRADIENT_COMPRESSION = Setting[dict[str, Any]](
    name="gradientCompression",
    field="gradient_compression",
    words="how gradients are compressed between the workers: 'none', 'fp16', 'bf16', 'topk', 'randomk', "
    "'sparsify', 'qsgd', 'sign', 'powersgd' or 'gradiveq', or a dict of the name and its options, such as "
    "{'name': 'powersgd', 'rank': 2}; with 'between': 'hosts' workers of one host sum whole gradients",
    default={"name": "none"},
    default_words="`'none'`",
    convert=_compression,
    without_effect=(
        lambda given: given["gradientCompression"] != {"name": "none"} and given["numWorkers"] == 1,
        "there is one worker",
    ),
)
