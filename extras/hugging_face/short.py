"""Shortens a network of the transformers library: the driver runs a few blocks instead of all."""

from __future__ import annotations

import json
from typing import Any

from ringspark.models import ModelSpec

# Names of the number of blocks in the configs of the library.
_DEPTHS = frozenset({
    *("num_hidden_layers", "num_layers", "n_layer", "n_layers"),
    *("encoder_layers", "decoder_layers", "num_encoder_layers", "num_decoder_layers"),
})  # fmt: skip


def shorten(spec: ModelSpec, num_blocks: int) -> ModelSpec | None:
    """Returns the spec with at most `num_blocks` blocks per stack; None if it has no more already."""
    import transformers

    kind: Any = getattr(transformers, spec.target.partition(":")[2], None)
    kwargs: dict[str, Any] = spec.kwargs
    try:
        config = kind.config_class.from_dict(kwargs["config"])
        whole = json.loads(json.dumps(config.to_dict()))
    except Exception:  # building the network raises the error with its remedy
        return None
    changed = _shorten(whole, num_blocks)
    return None if changed == whole else ModelSpec(spec.target, {**kwargs, "config": changed})


def _shorten(config: dict[str, Any], num_blocks: int) -> dict[str, Any]:
    depths = {key: n for key, n in config.items() if key in _DEPTHS and isinstance(n, int) and n > num_blocks}
    found = {
        key: _shorten(value, num_blocks) if isinstance(value, dict) else value
        for key, value in config.items()
    }
    for key, value in config.items():
        # One entry per block, such as `layer_types`.
        if isinstance(value, list) and "layer" in key and len(value) in depths.values():
            found[key] = value[:num_blocks]
    return found | dict.fromkeys(depths, num_blocks)
