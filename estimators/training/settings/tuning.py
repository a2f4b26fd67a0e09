"""Settings of fine-tuning: what is trained of a network, where it starts, which weights are kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

from ringspark.estimators.names import nearest
from ringspark.estimators.training.settings.declaration import Range, Setting
from ringspark.estimators.training.settings.places import without_secrets

_LORA: dict[str, Any] = {"rank": None, "alpha": None, "targets": None, "dropout": 0.0, "train": []}
_PRETRAINED: dict[str, Any] = {"uri": None, "ignore": [], "strict": True}


def _with_defaults(setting: str, value: Any, defaults: dict[str, Any]) -> dict[str, Any]:
    """Returns the dict with all keys of `defaults`; None there stands for a key that must be given."""
    if not isinstance(value, Mapping):
        raise TypeError(f"{setting} must be a dict with the keys {list(defaults)}, got {value!r}")
    for key in value:
        if key not in defaults:
            raise ValueError(
                f"{setting} takes the keys {list(defaults)}, got {key!r}{nearest(str(key), defaults)}"
            )
    if missing := [key for key, default in defaults.items() if default is None and value.get(key) is None]:
        raise ValueError(f"{setting} needs {missing[0]!r}; it takes the keys {list(defaults)}")
    return {**defaults, **value}


def _patterns(subject: str, value: Any, least: int = 0) -> list[str]:
    patterns = [value] if isinstance(value, str) else value
    is_list = isinstance(patterns, Sequence) and all(isinstance(p, str) and p for p in patterns)
    if not is_list or len(patterns) < least:
        raise ValueError(
            f"{subject} must be a name pattern or a list of patterns ('encoder.*'), got {value!r}"
        )
    return list(patterns)


def _number(subject: str, value: Any, rule: str, holds: bool) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
    if not is_number or not holds:
        raise ValueError(f"{subject} must be {rule}, got {value!r}")


def _lora(value: Any) -> dict[str, Any]:
    found = _with_defaults("lora", value, _LORA | ({"alpha": value["rank"]} if _has_rank(value) else {}))
    rank, alpha, dropout = found["rank"], found["alpha"], found["dropout"]
    _number("lora's rank", rank, "a whole number of at least 1", isinstance(rank, int) and rank >= 1)
    _number("lora's alpha", alpha, "above 0", isinstance(alpha, int | float) and alpha > 0)
    _number("lora's dropout", dropout, "from 0 to below 1", _is_share(dropout))
    found["targets"] = _patterns("lora's targets", found["targets"], least=1)
    found["train"] = _patterns("lora's train", found["train"])
    return found


def _has_rank(value: Any) -> bool:
    return isinstance(value, Mapping) and "rank" in value


def _is_share(value: Any) -> bool:
    return isinstance(value, int | float) and 0 <= value < 1


def _pretrained(value: Any) -> dict[str, Any]:
    found = _with_defaults("pretrained", {"uri": value} if isinstance(value, str) else value, _PRETRAINED)
    if not isinstance(found["strict"], bool):
        raise ValueError(f"pretrained's strict must be True or False, got {found['strict']!r}")
    found["uri"] = without_secrets(found["uri"])
    found["ignore"] = _patterns("pretrained's ignore", found["ignore"])
    return found


FREEZE = Setting[list[str]](
    name="freeze",
    field="freeze",
    words="patterns over names of parameters that are not trained, such as 'encoder.*'",
    default=[],
    convert=lambda value: _patterns("freeze", value),
    without_effect=(lambda given: given["lora"] is not None, "lora freezes all but its adapter"),
)
LORA = Setting[dict[str, Any] | None](
    name="lora",
    field="lora",
    words="low-rank adapters in place of the weights: {'rank': 8, 'alpha': 16, 'targets': ['*.query', "
    "'*.value'], 'dropout': 0.0, 'train': ['head.*']}; targets are patterns over names of linear layers, "
    "train over parameters that are trained beside; all others are frozen; the model has merged weights",
    convert=_lora,
)
PRETRAINED = Setting[dict[str, Any] | None](
    name="pretrained",
    field="pretrained",
    words="safetensors file, or folder with model.safetensors, that the training starts from: its URI, or "
    "{'uri': ..., 'ignore': patterns over names that stay out, 'strict': whether file and network must have "
    "all other names}",
    convert=_pretrained,
)
EMA_DECAY = Setting[float | None](
    name="emaDecay",
    field="ema_decay",
    words="decay, per optimizer step, of a moving average of the weights, which is validated and becomes the "
    "model; unset: the weights themselves",
    kind="float",
    accepts=Range(lambda decay: 0 < decay < 1, lambda: "must lie between 0 and 1"),
)
