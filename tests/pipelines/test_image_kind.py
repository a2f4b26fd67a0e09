"""Images of every format decode to pixels of one size; damaged images are refused."""

import io
import logging
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image as Pillow
from pyspark.ml.image import ImageSchema
from pyspark.sql import functions as F
from pyspark.sql.types import BinaryType

from ringspark.pipelines import Binary, Image, open_reader, write_shards
from ringspark.pipelines.rows import RaggedRows

RED, BLUE, WHITE = (255, 0, 0), (0, 0, 255), (255, 255, 255)
Pixels = np.ndarray


def noise(height: int, width: int, channels: int = 3, seed: int = 0) -> Pixels:
    shape = (height, width, channels) if channels > 1 else (height, width)
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def encoded(pixels: Any, form: str = "PNG", **options: Any) -> bytes:
    image = pixels if isinstance(pixels, Pillow.Image) else Pillow.fromarray(pixels)
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def bytes_decoded(kind: Binary, data: bytes) -> Pixels:
    rows = kind.decode(kind.encode(pa.array([data])).arrays)
    assert isinstance(rows, RaggedRows)
    return kind.finish("x", rows)["x"][0]


def pixels_of(kind: Image, data: bytes) -> Pixels:
    """Returns the pixels of one image in a batch, (channels, height, width)."""
    values, problems = kind.read(pa.array([data]))
    assert not problems, problems
    return kind.finish("x", kind.decode(kind.encode(values).arrays))["x"][0]


def problem_of(data: bytes, kind: Image | None = None) -> str:
    values, problems = (kind or Image(8, 8)).read(pa.array([data]))
    assert values.null_count == len(problems) == 1
    return problems[0]


def marked(mode: str) -> Pillow.Image:
    """Returns 4 x 6 white pixels with a red pixel in the upper left corner."""
    image = Pillow.new("RGB", (6, 4), WHITE)
    image.putpixel((0, 0), RED)
    return image.convert(mode)


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P", "CMYK", "RGBX"])
def test_a_red_pixel_is_red_in_every_mode_and_format(mode: str) -> None:
    form = "TIFF" if mode in ("CMYK", "RGBX") else "PNG"
    got = pixels_of(Image(4, 6), encoded(marked(mode), form))
    assert got.dtype == np.float32
    assert got.shape == (3, 4, 6)
    assert got[:, 0, 0].tolist() == [1, 0, 0]
    assert (got[:, :, 1:] == 1).all()


def test_grey_images_and_colours_become_each_other() -> None:
    grey = pixels_of(Image(4, 6, channels=1), encoded(marked("RGB")))
    assert grey.shape == (1, 4, 6)
    assert grey[0, 0, 0] == np.float32(76 / 255)  # ITU-R 601: 0.299 of red
    for mode in ("L", "LA", "1"):
        three = pixels_of(Image(4, 6), encoded(marked("L").convert(mode)))
        assert (three[0] == three[1]).all()
        assert (three[0] == three[2]).all()


def test_what_is_transparent_is_white_unless_transparency_is_a_channel() -> None:
    half = np.zeros((2, 2, 4), np.uint8)
    half[0] = (255, 0, 0, 255)  # the hidden colour is black
    assert pixels_of(Image(2, 2), encoded(half))[:, :, 0].T.tolist() == [[1, 0, 0], [1, 1, 1]]
    assert pixels_of(Image(2, 2, channels=4), encoded(half))[3].tolist() == [[1, 1], [0, 0]]
    assert bytes_decoded(Binary("image", (2, 2, 3)), encoded(half))[:, 0].tolist() == [[255, 0, 0], [255] * 3]
    palette = Pillow.new("P", (2, 1))
    palette.putpalette([0, 0, 0, 0, 0, 255])
    palette.putpixel((1, 0), 1)
    data = encoded(palette, transparency=0)
    assert pixels_of(Image(1, 2), data)[:, 0].T.tolist() == [[1, 1, 1], [0, 0, 1]]
    assert pixels_of(Image(1, 2, channels=4), data)[3].tolist() == [[0, 1]]
    opaque = encoded(marked("RGB").crop((0, 0, 2, 1)))
    assert pixels_of(Image(1, 2, channels=4), opaque)[3].tolist() == [[1, 1]]


TURNS = ["FLIP_LEFT_RIGHT", "ROTATE_180", "FLIP_TOP_BOTTOM"]
TURNS += ["TRANSPOSE", "ROTATE_90", "TRANSVERSE", "ROTATE_270"]


@pytest.mark.parametrize(("orientation", "turn"), [*enumerate(["", *TURNS], 1)])
def test_the_orientation_that_a_camera_notes_is_followed(orientation: int, turn: str) -> None:
    upright = Pillow.fromarray(noise(4, 6))
    # The transposition for each EXIF orientation undoes the camera's rotation.
    stored = upright.transpose(Pillow.Transpose[turn]) if turn else upright
    exif = Pillow.Exif()
    exif[0x0112] = orientation
    data = encoded(stored, "PNG", exif=exif)
    expected = np.asarray(upright).transpose(2, 0, 1) / np.float32(255)
    assert np.array_equal(pixels_of(Image(4, 6), data), expected)
    assert np.array_equal(bytes_decoded(Binary("image", (4, 6, 3)), data), np.asarray(upright))


def test_sizes_by_crop_and_by_stretch() -> None:
    # 4 x 12: a blue left third, white, a red right third.
    wide = np.full((4, 12, 3), 255, np.uint8)
    wide[:, :4], wide[:, 8:] = BLUE, RED
    cropped = pixels_of(Image(8, 8), encoded(wide))
    assert (cropped[:, :, 1:-1] == 1).all()  # the white middle third, except interpolated edges
    stretched = pixels_of(Image(6, 6, resize="stretch"), encoded(wide))
    assert stretched[:, 3, 0].tolist() == [0, 0, 1]
    assert stretched[:, 3, 5].tolist() == [1, 0, 0]
    # Downscaling averages a fine pattern; it does not sample pixels.
    stripes = np.zeros((64, 64), np.uint8)
    stripes[:, ::2] = 255
    small = pixels_of(Image(8, 8, channels=1), encoded(stripes))
    assert np.abs(small - 0.5).max() < 0.05


def test_mean_and_deviation_are_those_of_the_channels() -> None:
    got = pixels_of(Image(4, 6, mean=(0.5, 0.25, 0), std=(2, 1, 0.5)), encoded(marked("RGB")))
    assert got[:, 0, 0].tolist() == [0.25, -0.25, 0]
    assert got[:, 1, 1].tolist() == [0.25, 0.75, 2]
    assert pixels_of(Image(4, 6, mean=0.5, std=0.5), encoded(marked("RGB")))[:, 0, 0].tolist() == [1, -1, -1]


def test_a_large_photo_that_is_decoded_smaller_looks_the_same() -> None:
    # Smooth like a photo, so the JPEG decoder may skip fine detail.
    y, x = np.mgrid[0:600, 0:800] / 100
    photo = (127 + 100 * np.stack([np.sin(x), np.cos(y), np.sin(x + y)], -1)).astype(np.uint8)
    kind = Image(24, 32)
    by_jpeg, by_png = (pixels_of(kind, encoded(photo, form)) for form in ("JPEG", "PNG"))
    assert np.abs(by_jpeg - by_png).max() < 0.03


@pytest.mark.parametrize(
    ("form", "options"),
    [("PNG", {}), ("JPEG", {}), ("JPEG", {"progressive": True}), ("GIF", {}), ("BMP", {}), ("WEBP", {})],
)
def test_a_file_that_ends_too_early_is_never_a_picture(form: str, options: dict[str, Any]) -> None:
    data = encoded(noise(9, 7), form, **options)
    kind = Image(9, 7)
    whole = pixels_of(kind, data)
    for end in range(len(data)):
        values, problems = kind.read(pa.array([data[:end]]))
        # Only bytes that mark the end of the file may be missing.
        if not problems:
            assert end >= len(data) - 20
            assert np.array_equal(kind.finish("x", kind.decode(kind.encode(values).arrays))["x"][0], whole)


@given(st.binary(max_size=64), st.integers(0, 200))
def test_bytes_that_are_no_image_are_named_and_raise_nothing(junk: bytes, place: int) -> None:
    data = encoded(noise(5, 5))
    damaged = data[:place] + junk + data[place + len(junk) :]
    values, problems = Image(5, 5).read(pa.array([junk, damaged, data]))
    assert 0 in problems
    assert 2 not in problems
    assert values.null_count == len(problems)


def test_what_cannot_be_right_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    assert problem_of(b"no") == "holds 2 bytes that cannot be read as an image (no format that Pillow knows)"
    assert "(image file is truncated" in problem_of(encoded(noise(64, 64), "JPEG")[:2000])
    deep = encoded(np.full((2, 2), 40_000, np.uint16))
    assert "more than 8 bits per channel; convert it" in problem_of(deep)
    monkeypatch.setattr(Pillow, "MAX_IMAGE_PIXELS", 100)
    assert "(Image size (144 pixels) exceeds limit of 100 pixels" in problem_of(encoded(noise(12, 12)))
    assert "(Image size (400 pixels) exceeds limit of 200 pixels" in problem_of(encoded(noise(20, 20)))


def test_without_pillow_the_remedy_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ValueError, match=r"type Image needs Pillow; pip install 'ringspark\[images\]'"):
        Image(4, 4).adopt("x", BinaryType())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"width": 2.5}, "width of Image must be a whole number"),
        ({"channels": 2}, "channels of Image must be one of 1, 3, 4, got 2"),
        ({"resize": "pad"}, "resize of Image must be 'crop' or 'stretch', got 'pad'"),
        ({"mean": (1, 2)}, "mean of Image must be one number, or 3"),
        ({"std": "wide"}, "std of Image must be one number, or 3"),
        ({"std": 0}, "std of Image must be above 0"),
    ],
)
def test_settings_that_no_image_could_have_are_refused(settings: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Image(**({"height": 4, "width": 4} | settings))


def one_batch(manifest: Any) -> Any:
    (batch,) = open_reader(manifest, engine="arrow", shuffle=False).batches(0)
    return batch


@pytest.mark.slow
@pytest.mark.spark
def test_sparks_image_struct_is_the_picture_of_its_file(spark: Any, tmp_path: Path) -> None:
    """Spark's two readers use different decoders and give the same pixels."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    clear = np.full((5, 6, 4), 255, np.uint8)
    clear[0, 0] = (255, 0, 0, 128)
    pictures = {"a": marked("RGB"), "b": noise(7, 5), "c": noise(4, 6, 1), "d": clear}
    for name, picture in pictures.items():
        (folder / f"{name}.png").write_bytes(encoded(picture))
    files = spark.read.format("binaryFile").load(str(folder)).select("path", "content")
    structs = spark.read.format("image").load(str(folder)).select("image")
    assert sorted(row.mode for row in structs.select("image.mode").collect()) == [0, 16, 16, 24]
    origin = F.replace("image.origin", F.lit("///"), F.lit("/"))  # each reader formats the path differently
    both = files.join(structs, files.path == origin).select("path", "content", "image")
    both = both.orderBy("path").drop("path").coalesce(1)
    columns = dict.fromkeys(("content", "image"), Image(4, 6))
    batch = one_batch(write_shards(both, str(tmp_path / "s"), columns=columns))
    assert batch["content"].shape == (4, 3, 4, 6)
    assert np.array_equal(batch["content"], batch["image"])
    assert batch["image"][0, :, 0, 0].tolist() == [1, 0, 0]


@pytest.mark.spark
def test_broken_and_missing_images_are_refused_left_out_or_kept(spark, tmp_path, caplog):
    good = encoded(noise(3, 3))
    rows = [(0, good), (1, None), (2, good[:-30]), (3, good), (4, b"")]
    df = spark.createDataFrame(rows, "id int, content binary").coalesce(1)
    columns = {"content": Image(3, 3)}

    def write(some: str, handling: Any = "error", name: str = "s") -> Any:
        rows = df.where(some)
        return write_shards(rows, str(tmp_path / name), columns=columns, handle_invalid=handling)

    for some, handling, message in (
        ("id < 2", "error", r"^column 'content' has nulls in 1 of 2 rows"),
        ("id != 1", "error", r"^column 'content' holds \d+ bytes .* in row 1 \(counted from 0\) of wr"),
        ("id != 1", "keep", r"^column 'content' holds \d+ bytes .* in row 1 \(counted from 0\) of wr"),
        ("id = 4", "skip", r"no training rows .*, 1 are skipped"),
    ):
        with pytest.raises(ValueError, match=message):
            write(some, handling)
    assert not (tmp_path / "s").exists()
    with caplog.at_level(logging.WARNING):
        left = write("true", "skip")
    assert left.skipped_rows == 3
    assert "2 rows were left out because their column 'content' cannot be read" in caplog.text
    assert one_batch(left)["id"].tolist() == [0, 3]
    kept = write("id < 2", {"content": "keep"}, "k")
    batch = one_batch(kept)
    assert batch["content.isnull"].tolist() == [False, True]
    assert (batch["content"][1] == 0).all()
    assert kept.stats["train"]["content"].values == 27


@pytest.mark.spark
def test_an_image_that_spark_could_not_read_is_named_by_its_file(spark: Any, tmp_path: Path) -> None:
    # Spark's reader returns the first row for an undecodable file; the second row's size does not match its
    # bytes.
    bad = [("file:/a.png", -1, -1, -1, -1, bytearray()), ("file:/b.png", 2, 2, 3, 16, bytearray(5))]
    for row, said in zip(
        bad, ["could not read 'file:/a.png'", "'file:/b.png' has 5 bytes, but needs 2 x 2 x 3"], strict=True
    ):
        df = spark.createDataFrame([(row,)], ImageSchema.imageSchema)
        with pytest.raises(ValueError, match=f"column 'image' holds an image that cannot .*{said}"):
            write_shards(df, str(tmp_path / "s"), columns={"image": Image(2, 2)})
