"""Images: accuracy of the ResNet against scikit-learn's models, and the read rate of pixels and files.

Accuracy is measured on scikit-learn's 1,797 digits, written as PNG files of 8 to 32 pixels per side, with one
folder per class. Spark reads them with `binaryFile`. The scikit-learn models get the same splits, and the 64
original values of a digit. No hyperparameters were searched.

The read rates use JPEG crops, 300 to 427 pixels per side, of scikit-learn's two photos. The column type Image
stores them as pixels. The other cases decode each file again in each epoch.
"""

from __future__ import annotations

import io
import tempfile
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

import harness
import numpy as np

from ringspark.estimators import TorchClassifier
from ringspark.jobs import cli
from ringspark.models import ModelSpec
from ringspark.pipelines import Image, ShardManifest, open_reader, write_shards

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

DIGITS = Image(16, 16, channels=1)
NETWORK = ModelSpec(
    "resnet", {"in_channels": 1, "out_features": 10, "depths": [1, 1, 1], "width": 16, "norm": "batch"}
)
PHOTOS = Image(224, 224)


def encoded(pixels: Any, form: str, **options: Any) -> bytes:
    """Returns one image as the bytes of a file."""
    from PIL import Image as Pillow

    buffer = io.BytesIO()
    Pillow.fromarray(pixels).save(buffer, form, **options)
    return buffer.getvalue()


def write_digits(folder: Path, digits: Any, labels: Any) -> None:
    """Writes each digit into the folder of its class, at one to four times its size."""
    for number, (digit, label) in enumerate(zip(digits, labels, strict=True)):
        scaled = np.kron(
            (digit * 255 / 16).round().astype(np.uint8), np.ones((1 + number % 4,) * 2, np.uint8)
        )
        place = folder / str(label)
        place.mkdir(exist_ok=True)
        (place / f"{number}.png").write_bytes(encoded(scaled, "PNG"))


def read_digits(spark: SparkSession, folder: Path) -> DataFrame:
    """Returns the rows of all files: the image, its number, and its class from the folder's name."""
    from pyspark.sql import functions as F

    files = spark.read.format("binaryFile").option("recursiveFileLookup", "true").load(str(folder))
    return files.select(
        "content",
        F.regexp_extract("path", r"/(\d)/\d+\.png$", 1).alias("digit"),
        F.regexp_extract("path", r"/(\d+)\.png$", 1).cast("int").alias("number"),
    )


def ours(train: DataFrame, test: DataFrame, folder: str, seed: int, options: Namespace) -> float:
    """Returns the network's accuracy on the test rows."""
    from pyspark.sql import functions as F

    model = TorchClassifier(
        model=NETWORK,
        featuresCol="content",
        labelCol="digit",
        columns={"content": DIGITS},
        epochs=options.epochs,
        batchSize=64,
        learningRate=0.005,
        lrSchedule="one_cycle",
        weightDecay=0.05,
        numWorkers=2,
        seed=seed,
        inferenceBatchSize=128,
        storageUri=folder,
        showProgress=False,
    ).fit(train)
    right = F.avg((F.col("digit") == F.col("predictedLabel")).cast("double"))
    return float(model.transform(test).agg(right).first()[0])


def theirs(seed: int, options: Namespace) -> dict[str, Any]:
    """Returns the models of scikit-learn by name."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.neural_network import MLPClassifier
    from sklearn.svm import SVC

    return {
        "logistic regression": LogisticRegression(max_iter=2000),
        "MLP of 64 and 64": MLPClassifier(
            [64, 64], max_iter=500 if not options.tiny else 5, random_state=seed
        ),
        "SVM, radial": SVC(C=10, gamma="scale"),
    }


def accuracies(spark: SparkSession, folder: str, options: Namespace) -> dict[str, list[float]]:
    """Returns accuracies on the held-out fifth, one per split, by model."""
    import warnings

    from pyspark.sql import functions as F
    from sklearn.datasets import load_digits
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.model_selection import train_test_split

    x, y = load_digits(return_X_y=True)
    files = Path(folder) / "digits"
    files.mkdir()
    write_digits(files, x.reshape(-1, 8, 8), y)
    rows = read_digits(spark, files).coalesce(harness.NUM_WORKERS).cache()
    found: dict[str, list[float]] = {}
    for seed in range(1, options.repeats + 1):
        train, test = train_test_split(np.arange(len(y)), test_size=0.2, stratify=y, random_state=seed)
        is_test = F.col("number").isin(test.tolist())
        results = {"ResNet": ours(rows.where(~is_test), rows.where(is_test), folder, seed, options)}
        for name, model in theirs(seed, options).items():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ConvergenceWarning)
                results[name] = float(model.fit(x[train] / 16, y[train]).score(x[test] / 16, y[test]))
        print(f"split {seed}: " + ", ".join(f"{k} {v:.4f}" for k, v in results.items()), flush=True)
        for name, value in results.items():
            found.setdefault(name, []).append(value)
    return found


def photos(number: int) -> list[bytes]:
    """Returns crops of scikit-learn's two photos, as JPEG."""
    from sklearn.datasets import load_sample_images

    random, pictures = np.random.default_rng(0), load_sample_images().images
    files = []
    for i in range(number):
        whole = pictures[i % len(pictures)]
        height, width = random.integers(300, 428, 2)
        top, left = random.integers(0, whole.shape[0] - height + 1), random.integers(0, 640 - width + 1)
        files.append(encoded(whole[top : top + height, left : left + width], "JPEG", quality=90))
    return files


def reading(
    spark: SparkSession, folder: str, options: Namespace
) -> tuple[dict[str, Callable[[], float]], int, int]:
    """Returns functions that read the photos once and return rows/s, and the bytes of files and shards."""
    import pyarrow as pa

    files = photos(options.photos)
    rows = spark.createDataFrame([(data,) for data in files], "photo binary").repartition(2).cache()
    rows.count()

    def written(name: str) -> ShardManifest:
        return write_shards(rows, f"{folder}/{name}", columns={"photo": PHOTOS}, overwrite=True)

    manifest = written("photos")

    def write() -> float:
        return len(files) / harness.seconds_of(lambda: written("again"))

    def read() -> float:
        reader = open_reader(manifest, batch_size=64, engine="arrow")
        return len(files) / harness.seconds_of(lambda: sum(len(b["photo"]) for b in reader.batches(0)))

    def decode() -> float:
        def batches() -> None:
            for start in range(0, len(files), 64):
                pixels, _ = PHOTOS.read(pa.array(files[start : start + 64]))
                PHOTOS.finish("photo", PHOTOS.decode([pixels]))

        return len(files) / harness.seconds_of(batches)

    cases = {
        "shards of pixels, one reader": read,
        "files decoded in the reader, one thread": decode,
        "the write, two tasks": write,
    }
    return cases, sum(map(len, files)), sum(file.num_bytes for file in manifest.files)


def main() -> None:
    """Prints both tables."""
    options = harness.parse(__doc__, epochs=(15, 1), photos=(1000, 20), rounds=(3, 1))
    with tempfile.TemporaryDirectory() as folder, cli.spark("ringspark images", harness.MASTER) as spark:
        found = accuracies(spark, folder, options)
        cases, given, stored = reading(spark, folder, options)
        rates = harness.measure_in_turns(cases, options.rounds)
    harness.print_table(
        f"accuracy on the held-out fifth of 1,797 digits, {options.repeats} splits, {options.epochs} epochs",
        ["", "mean", "worst", "best", "ratio to the ResNet's"],
        [
            [name, *(f"{f(v):.4f}" for f in (mean, min, max)), f"{mean(v) / mean(found['ResNet']):.3f}"]
            for name, v in found.items()
        ],
    )
    harness.print_table(
        f"images/s of {options.photos} JPEGs, {given / options.photos / 1000:,.0f} kB each, as "
        f"3 x 224 x 224; {stored / options.photos / 1000:,.0f} kB each in the shards",
        ["", "median", "lowest", "highest", "ratio"],
        harness.rate_rows(rates, "files decoded in the reader, one thread"),
    )


if __name__ == "__main__":
    main()
