"""Damaged and hostile versions of a good file, drawn by hypothesis: of its bytes, and of its JSON."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

# What a hand or another program would put in the place of a value.
ODD_VALUES: list[Any] = [
    *[None, True, False, 0, -1, 1, 2**31, 2**63, -(2**64), 10**30, 1.5, -0.0, 1e308],
    *[float("nan"), float("inf"), "", ".", "..", "../../etc/passwd", "/etc/passwd", "a/../../b"],
    *["s3://bucket/x", "\x00", "\ud800", "x" * 5000, "os:system", "builtins:eval", "subprocess:Popen"],
    *["__main__:X", "nan", "1", [], [[]], [None], {}, {"": None}, {"a": {"b": [1]}}, [0] * 1000],
]
DEEP = "[" * 100_000


@st.composite
def damaged_bytes(draw: st.DrawFn, good: bytes) -> bytes:
    """`good` with up to six changes: bytes replaced, cut out, put in, repeated, or the end cut off."""
    data = bytearray(good)
    for _ in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        length = draw(st.sampled_from([1, 1, 2, 4, 8, 64]))
        match draw(st.sampled_from(["replace", "flip", "cut", "insert", "repeat", "end"])):
            case "replace":
                data[at : at + length] = draw(st.binary(min_size=length, max_size=length))
            case "flip" if data:
                data[at] ^= 1 << draw(st.integers(0, 7))
            case "cut":
                del data[at : at + length]
            case "insert":
                data[at:at] = draw(st.binary(min_size=1, max_size=8))
            case "repeat":
                data[at:at] = data[at : at + length]
            case "end":
                del data[at:]
            case _:
                pass
    return bytes(data)


@st.composite
def damaged_json(draw: st.DrawFn, good: bytes) -> bytes:
    """`good` with up to three values replaced, dropped, added or exchanged; NaN written as Python does."""
    value = json.loads(good)
    for _ in range(draw(st.integers(1, 3))):
        value = _changed(draw, value)
    text = json.dumps(value)
    if draw(st.integers(0, 19)) == 0:
        text = DEEP + text
    return text.encode()


def _changed(draw: st.DrawFn, value: Any) -> Any:
    """One change at a random place of the tree."""
    children = (
        list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else []
    )
    if not children or draw(st.integers(0, 3)) == 0:
        return draw(st.sampled_from(ODD_VALUES))
    key = draw(st.sampled_from(children))
    result = dict(value) if isinstance(value, dict) else list(value)
    match draw(st.sampled_from(["inside", "inside", "inside", "drop", "add", "exchange"])):
        case "drop":
            del result[key]
        case "add" if isinstance(result, dict):
            result[draw(st.sampled_from(["x", "__class__", "self", "path", ""]))] = draw(
                st.sampled_from(ODD_VALUES)
            )
        case "add":
            result.append(result[key])
        case "exchange":
            other = draw(st.sampled_from(children))
            result[key], result[other] = result[other], result[key]
        case _:
            result[key] = _changed(draw, result[key])
    return result
