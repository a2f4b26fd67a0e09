"""Images through the stages: augmentation, broken images, and the number of images per forward pass."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as Pillow
from spark_tables import quiet
from torch import nn

from ringspark.estimators import TorchClassifier
from ringspark.models import ModelSpec
from ringspark.pipelines import Image

pytestmark = pytest.mark.spark

# Group norm uses statistics per row, so the number of workers does not change the training.
NETWORK = ModelSpec(
    "resnet", {"in_channels": 3, "out_features": 2, "depths": [1], "width": 4, "norm": "group"}
)


def picture(row: int) -> np.ndarray[Any, Any]:
    """Returns noise of random size, with more red in every second row and more blue in the other rows."""
    height, width = 5 + row % 4, 6 + row % 3
    pixels = np.random.default_rng(row).integers(0, 160, (height, width, 3))
    pixels[:, :, 0 if row % 2 else 2] += 90
    return pixels.astype(np.uint8)


def png(pixels: np.ndarray[Any, Any]) -> bytes:
    buffer = io.BytesIO()
    Pillow.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture(scope="module")
def table(spark):
    rows = [(i, png(picture(i)), "red" if i % 2 else "blue") for i in range(40)]
    return spark.createDataFrame(rows, "id long, content binary, colour string").repartition(2, "id")


def classifier(folder: Path, **params: Any) -> TorchClassifier:
    columns = {"content": Image(6, 6, mean=0.5, std=0.25)}
    names = {"featuresCol": "content", "labelCol": "colour", "columns": columns}
    settings = {"model": NETWORK, "epochs": 4, "batchSize": 8, "learningRate": 0.03}
    return quiet(TorchClassifier, folder, **(names | settings | params))


def predicted(frame: Any) -> dict[int, tuple[str, list[float]]]:
    return {row.id: (row.predictedLabel, row.rawPrediction.toArray().tolist()) for row in frame.collect()}


@pytest.mark.extras
@pytest.mark.slow
def test_augmentation_changes_training_images_alone_and_by_the_seed(table, tmp_path):
    from ringspark.models import RandomCrop, RandomHorizontalFlip

    augmented = nn.Sequential(RandomCrop(1), RandomHorizontalFlip())
    plain, first, again = (
        classifier(tmp_path, epochs=1, transformBatch=transform).fit(table)
        for transform in (None, augmented, augmented)
    )
    states = [model.module().state_dict() for model in (plain, first, again)]
    assert all(torch.equal(states[1][name], states[2][name]) for name in states[1])
    assert not torch.equal(states[0]["stem.weight"], states[1]["stem.weight"])
    first.save(str(tmp_path / "model"))
    loaded = type(first).load(str(tmp_path / "model"))
    assert predicted(loaded.transform(table)) == predicted(first.transform(table))


@pytest.mark.slow
@pytest.mark.modes
def test_broken_images_in_transform_are_refused_left_out_or_kept(table, tmp_path):
    rows = table.sparkSession.createDataFrame(
        [(0, png(picture(0))), (1, None), (2, png(picture(2))[:40]), (3, png(picture(3)))],
        "id long, content binary",
    ).coalesce(1)
    model = classifier(tmp_path, epochs=1).fit(table)
    whole = predicted(model.transform(rows.where("id in (0, 3)")))
    refusal = r"column 'content' holds 40 bytes .* in transform; repair or drop it"
    with pytest.raises(Exception, match=refusal):
        model.transform(rows.where("id != 1")).collect()
    with pytest.raises(Exception, match="column 'content' has a null or NaN in transform"):
        model.transform(rows.where("id != 2")).collect()
    assert predicted(model.copy({model.handleInvalid: "skip"}).transform(rows)) == whole
    kept = model.copy({model.handleInvalid: "keep"}).transform(rows).collect()
    assert {row.id: row.prediction for row in kept if row.id in (1, 2)} == {1: None, 2: None}
    assert len(kept) == 4


@pytest.mark.extras
def test_a_forward_pass_takes_fewer_images_than_numbers_unless_told(table, tmp_path):
    wide = classifier(tmp_path, epochs=1, batchSize=40, columns={"content": Image(64, 64)}).fit(table)
    assert wide._predictor().batch_size == (64 << 20) // (4 * 3 * 64 * 64)
    assert wide.copy({wide.inferenceBatchSize: 3000})._predictor().batch_size == 3000
    wide.save(str(tmp_path / "wide"))
    assert type(wide).load(str(tmp_path / "wide"))._predictor().batch_size == 1365
    small = wide.copy()
    small._inputs = ()
    assert small._predictor().batch_size == 2048
