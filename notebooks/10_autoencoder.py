# Databricks notebook source
# MAGIC %md
# MAGIC # Autoencoders without a label
# MAGIC
# MAGIC A linear autoencoder finds the subspace of PCA. A denoising autoencoder removes noise from images of
# MAGIC digits, and a masked autoencoder fills in missing pixels. The data come from scikit-learn.
# MAGIC
# MAGIC Needs `ringspark` on the cluster (`%pip install ringspark`).

# COMMAND ----------

import os
import tempfile

import numpy as np
from pyspark.ml.functions import vector_to_array
from pyspark.sql import functions as F
from sklearn.datasets import load_digits, load_wine

from ringspark.estimators import TorchAutoencoder
from ringspark.models import ModelSpec

# A folder that the driver and all workers reach.
FOLDER = "/dbfs/tmp/ringspark-auto" if os.path.isdir("/dbfs/tmp") else tempfile.mkdtemp(prefix="auto-")


def frame(rows):
    return spark.createDataFrame([(row.tolist(),) for row in rows.astype("f4")], "features array<float>")


def autoencoder(width, code, hidden=()):
    sizes = {"in_features": width, "code": code, "hidden": hidden}
    return ModelSpec("ringspark.extras.pretraining.networks:Autoencoder", sizes)


# COMMAND ----------

# MAGIC %md
# MAGIC ## The loss of a linear autoencoder is the variance that PCA drops
# MAGIC 178 wines with 13 standardized measurements. The least squared error with 3 units is the sum of the 10
# MAGIC smallest eigenvalues of the covariance. The training loss is a mean over the 13 numbers of a row.

# COMMAND ----------

wine = load_wine().data
wine = (wine - wine.mean(0)) / wine.std(0)
wines = frame(wine)
linear = TorchAutoencoder(
    model=autoencoder(13, 3),
    innerCols={"encoder": "code"},
    epochs=400,
    batchSize=178,
    learningRate=0.03,
    lrSchedule="cosine",
    storageUri=f"{FOLDER}/storage",
    showProgress=False,
).fit(wines)
eigenvalues = np.linalg.eigvalsh(np.cov(wine.T, bias=True))
loss, dropped = 13 * linear.summary.history["train_loss"].iloc[-1], eigenvalues[:10].sum()
print(f"squared error {loss:.6f}, dropped eigenvalues {dropped:.6f}")

# COMMAND ----------

# MAGIC %md
# MAGIC The code is a vector column. It spans the space of the first three components.

# COMMAND ----------

coded = linear.transform(wines)
coded.select(F.round(vector_to_array("code")[0], 3).alias("first number of the code")).show(3)
codes = np.array([[*row.code.toArray(), 1.0] for row in coded.select("code").collect()])  # 1 for the bias
components = wine @ np.linalg.eigh(np.cov(wine.T, bias=True))[1][:, -3:]
projected = codes @ np.linalg.lstsq(codes, components, rcond=None)[0]
print(f"largest error of the components from the codes: {np.abs(projected - components).max():.4f}")

# COMMAND ----------

# MAGIC %md
# MAGIC ## Denoising
# MAGIC 8 x 8 pixels from 0 to 1. `noise` adds Gaussian noise to the inputs of the training, and the targets
# MAGIC stay clean. The test rows are noisy.

# COMMAND ----------

digits = load_digits().data / 16
train, test = frame(digits[:1400]), digits[1400:]
noisy = test + 0.3 * np.random.default_rng(0).normal(size=test.shape)
common = {
    "model": autoencoder(64, 24, [128]),
    "epochs": 40,
    "batchSize": 64,
    "learningRate": 0.005,
    "lrSchedule": "cosine",
    "storageUri": f"{FOLDER}/storage",
    "showProgress": False,
}


def reconstruct(model, rows):
    return np.array([row.prediction for row in model.transform(frame(rows)).select("prediction").collect()])


errors = {"nothing": np.square(noisy - test).mean()}
for name, settings in {"plain": {}, "denoising": {"noise": 0.3}}.items():
    model = TorchAutoencoder(**common, **settings).fit(train)
    errors[name] = np.square(reconstruct(model, noisy) - test).mean()
for name, error in errors.items():
    print(f"mean squared error of noisy digits after {name}: {error:.4f}")

# COMMAND ----------

# MAGIC %md
# MAGIC ## Masking
# MAGIC `mask` replaces a share of the pixels by `maskValue`, here each pixel's mean. The loss compares only
# MAGIC these pixels. The same share of the test pixels is missing.

# COMMAND ----------

means = digits[:1400].mean(0)
masked = TorchAutoencoder(mask=0.3, maskValue=means.tolist(), **common).fit(train)
missing = np.random.default_rng(1).random(test.shape) < 0.3
filled = reconstruct(masked, np.where(missing, means, test))
fills = {
    "the mean": np.square(means - test)[missing].mean(),
    "the masked autoencoder": np.square(filled - test)[missing].mean(),
}
for name, error in fills.items():
    print(f"mean squared error of missing pixels filled by {name}: {error:.4f}")
