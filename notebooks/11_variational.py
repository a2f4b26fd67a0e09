# Databricks notebook source
# MAGIC %md
# MAGIC # A variational autoencoder
# MAGIC
# MAGIC The network adds the divergence of the code from a standard normal distribution to the loss, by
# MAGIC `add_loss`. With linear layers the best possible evidence lower bound is known: it is the likelihood
# MAGIC of probabilistic PCA (Tipping and Bishop 1999; Lucas et al. 2019). With hidden layers the decoder
# MAGIC generates new digits.
# MAGIC
# MAGIC Needs `ringspark` on the cluster (`%pip install ringspark`).

# COMMAND ----------

import os
import tempfile

import numpy as np
import torch
from sklearn.datasets import load_digits, load_wine

from ringspark.estimators import TorchAutoencoder
from ringspark.models import ModelSpec

# A folder that the driver and all workers reach.
FOLDER = "/dbfs/tmp/ringspark-vae" if os.path.isdir("/dbfs/tmp") else tempfile.mkdtemp(prefix="vae-")


def frame(rows):
    return spark.createDataFrame([(row.tolist(),) for row in rows.astype("f4")], "features array<float>")


def variational(width, code, hidden, variance):
    sizes = {"in_features": width, "code": code, "hidden": hidden, "variance": variance}
    return ModelSpec("ringspark.extras.pretraining.networks:VariationalAutoencoder", sizes)


# COMMAND ----------

# MAGIC %md
# MAGIC ## Linear layers reach the likelihood of probabilistic PCA
# MAGIC The variance of the decoder is the mean of the dropped eigenvalues, as in probabilistic PCA. With a
# MAGIC linear decoder, the bound can be computed from the trained weights without sampling.

# COMMAND ----------

wine = load_wine().data
wine = (wine - wine.mean(0)) / wine.std(0)
WIDTH, CODE = 13, 3
eigenvalues = np.linalg.eigvalsh(np.cov(wine.T, bias=True))[::-1]
variance = float(eigenvalues[CODE:].mean())
model = TorchAutoencoder(
    model=variational(WIDTH, CODE, [], variance),
    epochs=600,
    batchSize=178,
    learningRate=0.03,
    lrSchedule="cosine",
    storageUri=f"{FOLDER}/storage",
    showProgress=False,
).fit(frame(wine))

# COMMAND ----------


def bound(network, rows):
    """Mean evidence lower bound of a variational autoencoder with a linear decoder."""
    x = torch.tensor(rows, dtype=torch.float32)
    with torch.no_grad():
        mean, log_variance = network.mean(x), network.log_variance(x)
        weight = network.decoder[-1].weight  # (width, code)
        square = (network.decoder(mean) - x).square().sum(1) + (log_variance.exp() @ weight.square().T).sum(1)
        divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(1)
        log_density = -0.5 * (square / variance + x.shape[1] * np.log(2 * np.pi * variance))
    return float((log_density - divergence).mean())


likelihood = -0.5 * (
    WIDTH * np.log(2 * np.pi) + np.log(eigenvalues[:CODE]).sum() + (WIDTH - CODE) * np.log(variance) + WIDTH
)
elbo = bound(model.module(), wine)
print(f"evidence lower bound {elbo:.3f}, log-likelihood of probabilistic PCA {likelihood:.3f}")

# COMMAND ----------

# MAGIC %md
# MAGIC ## Digits with hidden layers
# MAGIC `innerCols={"mean": "code"}` adds the mean of the code as a column. The code has noise in the training
# MAGIC only, so `transform` returns the same predictions each time.

# COMMAND ----------

digits = load_digits().data / 16
drawn = TorchAutoencoder(
    model=variational(64, 8, [128], 0.03),
    innerCols={"mean": "code"},
    epochs=60,
    batchSize=64,
    learningRate=0.003,
    lrSchedule="cosine",
    storageUri=f"{FOLDER}/storage",
    showProgress=False,
).fit(frame(digits[:1400]))
held_out = drawn.transform(frame(digits[1400:])).select("prediction", "code").collect()
error = np.square(np.array([row.prediction for row in held_out]) - digits[1400:]).mean()
spread = np.array([row.code.toArray() for row in held_out]).std(0)
print(f"mean squared error of unseen digits: {error:.4f}")
print(f"mean squared error of the mean digit: {digits[1400:].var(0).mean():.4f}")
print(f"standard deviations of the code: {np.sort(spread).round(2)}")

# COMMAND ----------

# MAGIC %md
# MAGIC A new digit from a random code:

# COMMAND ----------

with torch.no_grad():
    code = torch.randn(1, 8, generator=torch.Generator().manual_seed(3))
    pixels = drawn.module().decoder(code).reshape(8, 8)
shades = (pixels.clamp(0, 0.99) * 5).int().tolist()
picture = ["".join(" .:*#"[shade] * 2 for shade in row) for row in shades]
print("\n".join(picture))
