# Databricks notebook source
# MAGIC %md
# MAGIC # Layer by layer, then with few labels
# MAGIC
# MAGIC Greedy pretraining (Hinton and Salakhutdinov 2006; Bengio et al. 2007) trains one layer at a time. The
# MAGIC first autoencoder reconstructs the pixels. The next one reconstructs the hidden layer of the first
# MAGIC one, and so on. Then a network of these layers trains on a few labels, once with frozen layers and
# MAGIC once with all weights. Deep networks with sigmoids gain most, because they learn slowly from scratch.
# MAGIC
# MAGIC Needs `ringspark` on the cluster (`%pip install ringspark`).

# COMMAND ----------

import os
import tempfile
from itertools import pairwise

import torch
from sklearn.datasets import load_digits
from torch import nn

from ringspark.estimators import TorchAutoencoder, TorchClassifier

# A folder that the driver and all workers reach, and the number of labels.
FOLDER = "/dbfs/tmp/ringspark-layers" if os.path.isdir("/dbfs/tmp") else tempfile.mkdtemp(prefix="layers-")
LABELS = 100

# COMMAND ----------

images, digits = load_digits(return_X_y=True)
rows = [
    (i, (image / 16).tolist(), int(digit))
    for i, (image, digit) in enumerate(zip(images, digits, strict=True))
]
table = spark.createDataFrame(rows, "id int, pixels array<float>, label int").cache()
unlabeled, test = table.where("id < 1400"), table.where("id >= 1400")
few = table.where(f"id < {LABELS}")

# COMMAND ----------

# MAGIC %md
# MAGIC ## Three autoencoders of one layer
# MAGIC `innerCols` turns the hidden layer into a column of vectors, and the next autoencoder reads it. The
# MAGIC earlier layers no longer change.

# COMMAND ----------


def layer(before, after):
    encoder = nn.Sequential(nn.Linear(before, after), nn.Sigmoid())
    return nn.Sequential(encoder, nn.Linear(after, before))


SIZES = [64, 128, 64, 32]
column, frame, layers = "pixels", unlabeled, []
for number, (before, after) in enumerate(pairwise(SIZES)):
    torch.manual_seed(number)
    model = TorchAutoencoder(
        model=layer(before, after),
        featuresCol=column,
        innerCols={"0": f"hidden{number}"},
        predictionCol=f"reconstruction{number}",
        noise=0.1,
        epochs=30,
        batchSize=64,
        learningRate=0.005,
        lrSchedule="cosine",
        storageUri=f"{FOLDER}/storage",
        showProgress=False,
    ).fit(frame)
    layers.append(model.module()[0])
    frame, column = model.transform(frame), f"hidden{number}"
    loss = model.summary.history["train_loss"].iloc[-1]
    print(f"layer {number}, {before} to {after} units: mean squared error {loss:.4f}")

# COMMAND ----------

# MAGIC %md
# MAGIC ## The network of all layers
# MAGIC A training starts from the weights of the module that it gets.

# COMMAND ----------


def network(pretrained):
    torch.manual_seed(2)
    made = nn.Sequential(*(nn.Sequential(nn.Linear(a, b), nn.Sigmoid()) for a, b in pairwise(SIZES)))
    if pretrained:
        for mine, found in zip(made, layers, strict=True):
            mine.load_state_dict(found.state_dict())
    return nn.Sequential(made, nn.Linear(SIZES[-1], 10))


accuracies = {}
for name, pretrained, freeze in [
    ("from scratch", False, []),
    ("pretrained and frozen", True, ["0.*"]),
    ("pretrained", True, []),
]:
    classifier = TorchClassifier(
        model=network(pretrained),
        featuresCol="pixels",
        freeze=freeze,
        metrics=["accuracy"],
        epochs=60,
        batchSize=32,
        learningRate=0.003,
        lrSchedule="cosine",
        storageUri=f"{FOLDER}/storage",
        showProgress=False,
    )
    accuracies[name] = classifier.fit(few).evaluate(test)["accuracy"]
    print(f"accuracy with {LABELS} labels, {name}: {accuracies[name]:.3f}")
