"""Reads bytes: raw numbers, `npy` files, and images, which Pillow decodes as ringspark does."""

from __future__ import annotations

import base64
import binascii
import io
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from .values import NumpyArray, Reading, is_missing, shorten

# As in ringspark.pipelines.kinds.image_decoding, which explains them.
_EIGHT_BITS = {"1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr"}
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}
_CHANNELS = {0: 1, 16: 3, 24: 4}
_ORIENTATION = 0x0112
_SPARE = 2


def read_binary(values: Sequence[Any], kind: dict[str, Any], fills_nulls: bool) -> Reading:
    shape, dtype = tuple(kind["shape"]), np.dtype(kind["dtype"])
    made = np.zeros((len(values), *shape), dtype)
    missing = np.fromiter((is_missing(value) for value in values), bool, len(values))
    for row in np.flatnonzero(~missing).tolist():
        array = _decode_array(to_bytes(values[row]), kind["decoder"], shape, dtype)
        if array.shape != shape or array.dtype != dtype:
            raise ValueError(
                f"holds {array.dtype} of shape {array.shape}, but the model was trained on {dtype} of shape "
                f"{shape}"
            )
        made[row] = array
    return Reading.of({"": made}, missing, fills_nulls)


def read_image(values: Sequence[Any], kind: dict[str, Any], fills_nulls: bool) -> Reading:
    """Returns (rows, channels, height, width) fp32; an unreadable image is a problem of its row."""
    height, width, channels = kind["height"], kind["width"], kind["channels"]
    pixels = np.zeros((len(values), channels, height, width), np.uint8)
    missing = np.fromiter((_has_no_image(value) for value in values), bool, len(values))
    problems = {}
    for row in np.flatnonzero(~missing).tolist():
        try:
            pixels[row] = _decode_image(values[row], height, width, channels, kind["resize"])
        except Exception as error:  # Pillow raises exceptions of many classes
            problems[row] = f"holds an image that cannot be read ({str(error).split(chr(10))[0]})"
    made = pixels.astype(np.float32)
    made /= 255
    if np.any(kind["mean"]):
        made -= _per_channel(kind["mean"])
    if np.any(np.not_equal(kind["std"], 1)):
        made /= _per_channel(kind["std"])
    reading = Reading.of({"": made}, missing, fills_nulls)
    reading.problems |= problems
    return reading


def to_bytes(value: Any) -> bytes:
    """Returns bytes; a string is base64, as in JSON."""
    if isinstance(value, str):
        try:
            return base64.b64decode(value, validate=True)
        except (binascii.Error, ValueError):
            raise ValueError(f"holds {shorten(value)}, which is not base64") from None
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    raise ValueError(f"holds {shorten(value)}, which is neither bytes nor base64")


def _decode_array(data: bytes, decoder: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NumpyArray:
    if decoder == "raw":
        if len(data) != dtype.itemsize * int(np.prod(shape)):
            return np.frombuffer(data, np.uint8)
        return np.frombuffer(data, dtype.newbyteorder("<")).reshape(shape).astype(dtype)
    try:
        if decoder == "npy":
            read: Any = np.lib.format.read_array  # NumPy has no types for it
            array: NumpyArray = read(io.BytesIO(data), allow_pickle=False)
            return array.astype(array.dtype.newbyteorder("="), copy=False)
        image = _convert(_read_file(data), shape[2] if len(shape) == 3 else 1)
    except Exception as error:
        raise ValueError(f"holds {len(data)} bytes that cannot be read ({error})") from None
    return np.asarray(image).reshape(image.height, image.width, *shape[2:])


def _has_no_image(value: Any) -> bool:
    struct = value.asDict() if hasattr(value, "asDict") else value
    return is_missing(value) or (isinstance(struct, dict) and is_missing(struct.get("data")))


def _decode_image(value: Any, height: int, width: int, channels: int, resize: str) -> NumpyArray:
    from PIL import Image, ImageOps

    struct = value.asDict() if hasattr(value, "asDict") else value
    with warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        if isinstance(struct, dict):
            image = _from_struct(struct)
        else:
            image = _read_file(to_bytes(value), _SPARE * max(height, width))
        image = _convert(image, channels)
        if image.size != (width, height):
            bilinear = Image.Resampling.BILINEAR
            if resize == "stretch":
                image = image.resize((width, height), bilinear)
            else:
                image = ImageOps.fit(image, (width, height), bilinear)
    return np.asarray(image).reshape(height, width, channels).transpose(2, 0, 1)


def _read_file(data: bytes, enough: int | None = None) -> Any:
    from PIL import Image, ImageOps

    image: Any = Image.open(io.BytesIO(data))
    if image.mode not in _EIGHT_BITS:
        raise ValueError(f"its mode {image.mode!r} has more than 8 bits per channel")
    if enough is not None:
        image.draft(None, (enough, enough))  # affects only JPEG
    image.load()
    if image.getexif().get(_ORIENTATION, 1) != 1:
        image = ImageOps.exif_transpose(image)
    return image


def _from_struct(struct: dict[str, Any]) -> Any:
    """Returns the image of Spark's image struct."""
    from PIL import Image

    height, width, channels = (struct[name] for name in ("height", "width", "nChannels"))
    if _CHANNELS.get(struct["mode"]) != channels:
        raise ValueError(f"mode {struct['mode']} with {channels} channels is unknown")
    values = np.frombuffer(to_bytes(struct["data"]), np.uint8).reshape(height, width, channels)
    if channels == 1:
        return Image.fromarray(values[:, :, 0])
    order = [2, 1, 0, 3][:channels]  # OpenCV's colours are blue, green, red
    return Image.fromarray(np.ascontiguousarray(values[:, :, order]))


def _convert(image: Any, channels: int) -> Any:
    from PIL import Image

    mode = _MODES[channels]
    if image.mode in ("La", "RGBa"):
        image = image.convert({"La": "LA", "RGBa": "RGBA"}[image.mode])
    is_transparent = image.mode in ("LA", "PA", "RGBA") or "transparency" in image.info
    if is_transparent and channels != 4:
        white = Image.new("RGBA", image.size, "white")
        white.alpha_composite(image.convert("RGBA"))
        image = white
    return image if image.mode == mode else image.convert(mode)


def _per_channel(numbers: float | Sequence[float]) -> NumpyArray:
    return np.array(numbers, np.float32).reshape(-1, 1, 1)
