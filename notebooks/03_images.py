# Databricks notebook source
# MAGIC %md
# MAGIC # From a folder of images to a trained ResNet and back
# MAGIC
# MAGIC Which digit is in the picture? PNG files of several sizes, one folder per class. Spark reads and
# MAGIC decodes them, and two workers train a residual network.
# MAGIC
# MAGIC Needs `ringspark` with its `images` and `examples` extras
# MAGIC (`%pip install ringspark[images,examples]`).

# COMMAND ----------

import os
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image as Pillow
from pyspark.ml import Pipeline, PipelineModel
from pyspark.sql import functions as F
from sklearn.datasets import load_digits

from ringspark.estimators import TorchClassifier
from ringspark.models import ModelSpec, RandomCrop
from ringspark.pipelines import Image

# A folder that the driver and all workers reach.
FOLDER = "/dbfs/tmp/ringspark-images" if os.path.isdir("/dbfs/tmp") else tempfile.mkdtemp(prefix="images-")
# Spark takes a bare path as a DBFS path, not as a local one.
FOR_SPARK = f"file:{FOLDER}"
NUM_IMAGES = 800  # of 1,797

# COMMAND ----------

# MAGIC %md
# MAGIC ## The files
# MAGIC The digits of scikit-learn as PNG files, 8 to 32 pixels wide, as they would lie in a bucket.

# COMMAND ----------

digits = load_digits()
for number in range(NUM_IMAGES):
    place = Path(FOLDER, "files", str(digits.target[number]))
    place.mkdir(parents=True, exist_ok=True)
    pixels = (digits.images[number] * 255 / 16).astype(np.uint8)
    side = 8 * (1 + number % 4)
    Pillow.fromarray(pixels).resize((side, side)).save(place / f"{number}.png")
# A file with a broken upload.
whole = Path(FOLDER, "files", "0", "0.png").read_bytes()
Path(FOLDER, "files", "0", "broken.png").write_bytes(whole[:50])

# COMMAND ----------

# MAGIC %md
# MAGIC ## The table
# MAGIC `binaryFile` gives one row per file: its path and its bytes. The folder in the path is the label.

# COMMAND ----------

files = spark.read.format("binaryFile").option("recursiveFileLookup", "true").load(f"{FOR_SPARK}/files")
images = files.select("path", "content", F.regexp_extract("path", r"/(\d)/[^/]+$", 1).alias("digit"))
is_test = F.pmod(F.xxhash64(F.element_at(F.split("path", "/"), -1)), F.lit(5)) == 0
train, test = images.where(~is_test), images.where(is_test)
train.groupBy("digit").count().orderBy("digit").show()

# COMMAND ----------

# MAGIC %md
# MAGIC ## The network
# MAGIC `Image` turns a picture of any size into one channel of 16 x 16 values between 0 and 1. The Spark
# MAGIC tasks that write the training data decode each file once. `handleInvalid="skip"` leaves out the
# MAGIC broken file and reports it. Without it, the fit fails and names the file.

# COMMAND ----------

network = TorchClassifier(
    model=ModelSpec("resnet", {"in_channels": 1, "out_features": 10, "depths": [1, 1, 1], "width": 16}),
    featuresCol="content",
    labelCol="digit",
    columns={"content": Image(16, 16, channels=1)},
    handleInvalid="skip",
    transformBatch=RandomCrop(1),  # in training alone: a digit may stand a pixel further up or down
    epochs=6,
    batchSize=64,
    learningRate=0.005,
    lrSchedule="one_cycle",
    inferenceBatchSize=128,
    numWorkers=2,
    storageUri=f"{FOLDER}/storage",
)
model = Pipeline(stages=[network]).fit(train)
model.stages[-1].summary.history

# COMMAND ----------

# MAGIC %md
# MAGIC ## Predictions
# MAGIC The model decodes the files, so it also takes a stream of them. The predicted classes are strings
# MAGIC again.

# COMMAND ----------

model.write().overwrite().save(f"{FOR_SPARK}/model")
predictions = PipelineModel.load(f"{FOR_SPARK}/model").transform(test)
predictions.select("path", "digit", "predictedLabel", "probability").show(5, truncate=40)
right = F.avg((F.col("digit") == F.col("predictedLabel")).cast("double"))
accuracy = predictions.agg(right).first()[0]
print(f"accuracy on the files that were held out: {accuracy:.3f}")
