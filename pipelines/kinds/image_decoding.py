"""Decodes one image to pixels of a given size. Pillow decodes files; Spark's image struct is read directly.

Raises an error for truncated files, grey images with more than 8 bits, and decompression bombs. Of 16-bit
colours, Pillow keeps the upper 8 bits.
"""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from ringspark.pipelines.rows import NumpyArray

# Pillow's modes of eight bits per channel. It clips deeper ones, e.g. 16-bit PNGs, when it converts them.
EIGHT_BITS = {"1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr"}

MODES = {1: "L", 3: "RGB", 4: "RGBA"}
"""Pillow's mode for each number of channels."""

SPARK_FIELDS = ("origin", "height", "width", "nChannels", "mode", "data")
"""The fields of Spark's image struct (`pyspark.ml.image.ImageSchema`)."""

# OpenCV's numbers of CV_8UC1, CV_8UC3 and CV_8UC4, which Spark's reader makes.
_CHANNELS = {0: 1, 16: 3, 24: 4}

_ORIENTATION = 0x0112  # the EXIF tag

# A JPEG is decoded at 1/2, 1/4 or 1/8 of its size if that leaves this many times the wanted pixels per side.
# Pillow's `thumbnail` uses the same factor.
_SPARE = 2


def pillow(subject: str) -> Any:
    """Returns `PIL.Image`. Raises ValueError, which names `subject`, if Pillow is not installed."""
    try:
        from PIL import Image
    except ImportError:
        raise ValueError(f"{subject} needs Pillow; pip install 'ringspark[images]'") from None
    return Image


@contextmanager
def refuse_bombs() -> Iterator[None]:
    from PIL import Image

    with warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        yield


def decode(data: bytes, height: int, width: int, channels: int, resize: str) -> NumpyArray:
    """Returns an image as uint8 (channels, height, width). Raises an error if `data` is not a complete image.

    Args:
        data: An encoded image, or the result of `spark_image`.
        resize: "crop" or "stretch"; see `kinds.Image`.
    """
    image = _from_spark(data) if data.startswith(b"{") else read_file(data, _SPARE * max(height, width))
    image = _resize(convert(image, channels), width, height, resize)
    return np.asarray(image).reshape(height, width, channels).transpose(2, 0, 1)


def spark_image(source: Any) -> Any:
    """Returns Spark's image struct as bytes: its small fields as one line of JSON, then its pixels."""
    from pyspark.sql import functions as F

    header = F.to_json(F.struct(*(source.getField(name).alias(name) for name in SPARK_FIELDS[:-1])))
    return F.concat(F.encode(F.concat(header, F.lit("\n")), "UTF-8"), source.getField("data"))


def image_bytes(image: Mapping[str, Any]) -> bytes:
    """Returns the bytes that `spark_image` makes of an image struct."""
    header = {name: image[name] for name in SPARK_FIELDS[:-1] if image.get(name) is not None}
    return b"\n".join((json.dumps(header).encode(), image["data"]))


def describe_problem(data: bytes, error: Exception) -> str:
    from PIL import UnidentifiedImageError

    if data.startswith(b"{"):
        return f"holds an image that cannot be read ({error})"
    # Pillow's message names an object in memory.
    why = "no format that Pillow knows" if isinstance(error, UnidentifiedImageError) else str(error)
    return f"holds {len(data)} bytes that cannot be read as an image ({why})"


def is_turned(image: Any) -> bool:
    return bool(image.getexif().get(_ORIENTATION, 1) >= 5)


def read_file(data: bytes, enough: int | None = None) -> Any:
    """Decodes an image file and rotates it upright.

    A JPEG that is larger than `enough` pixels in height and width may be decoded at a reduced size.
    """
    from PIL import Image, ImageOps

    image: Any = Image.open(io.BytesIO(data))
    if image.mode not in EIGHT_BITS:
        raise ValueError(f"its mode {image.mode!r} has more than 8 bits per channel; convert it to 8 first")
    if enough is not None:
        image.draft(None, (enough, enough))  # affects only JPEG
    image.load()
    if image.getexif().get(_ORIENTATION, 1) != 1:
        image = ImageOps.exif_transpose(image)
    return image


def _from_spark(data: bytes) -> Any:
    from PIL import Image

    header, _, pixels = data.partition(b"\n")
    fields = json.loads(header)
    height, width, channels, mode = (fields.get(name) for name in ("height", "width", "nChannels", "mode"))
    origin = fields.get("origin")
    if mode == -1:
        raise ValueError(f"Spark could not read {origin!r}")
    if _CHANNELS.get(mode) != channels or min(height or 0, width or 0) < 1:
        raise ValueError(
            f"{origin!r} has mode {mode}, {channels} channels and size {height} x {width}; "
            "CV_8UC1, CV_8UC3 and CV_8UC4 can be read"
        )
    if len(pixels) != height * width * channels:
        raise ValueError(f"{origin!r} has {len(pixels)} bytes, but needs {height} x {width} x {channels}")
    values = np.frombuffer(pixels, np.uint8).reshape(height, width, channels)
    if channels == 1:
        return Image.fromarray(values[:, :, 0])
    order = [2, 1, 0, 3][:channels]  # OpenCV's colours are blue, green, red
    return Image.fromarray(np.ascontiguousarray(values[:, :, order]))


def convert(image: Any, channels: int) -> Any:
    """Returns the image with this many channels; transparent images are put on white first."""
    from PIL import Image

    mode = MODES[channels]
    if image.mode in ("La", "RGBa"):
        image = image.convert({"La": "LA", "RGBa": "RGBA"}[image.mode])
    is_transparent = image.mode in ("LA", "PA", "RGBA") or "transparency" in image.info
    if is_transparent and channels != 4:
        white = Image.new("RGBA", image.size, "white")
        white.alpha_composite(image.convert("RGBA"))
        image = white
    return image if image.mode == mode else image.convert(mode)


def _resize(image: Any, width: int, height: int, resize: str) -> Any:
    from PIL import Image, ImageOps

    if image.size == (width, height):
        return image
    # Pillow averages all source pixels of a target pixel, like torchvision's antialias=True.
    if resize == "stretch":
        return image.resize((width, height), Image.Resampling.BILINEAR)
    return ImageOps.fit(image, (width, height), Image.Resampling.BILINEAR)
