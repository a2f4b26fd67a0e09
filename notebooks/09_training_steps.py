# Databricks notebook source
# MAGIC %md
# MAGIC # A custom training step: a GAN
# MAGIC
# MAGIC A GAN has two networks with two losses and two optimizers. The generator turns noise into points, and
# MAGIC the critic learns to distinguish generated points from real ones. The real points lie around eight
# MAGIC centers on a ring. This is the usual test for mode collapse: a bad GAN generates points around a few
# MAGIC centers only.
# MAGIC
# MAGIC Needs `ringspark` on the cluster (`%pip install ringspark`).

# COMMAND ----------

import math

import numpy as np
import torch
from pyspark.sql import functions as F
from torch import nn

from ringspark.estimators import TorchEstimator

WORKERS, BATCH, EPOCHS, CRITIC_STEPS = 2, 256, 4, 2
ROWS, RADIUS, DEVIATION, NOISE = 40_000, 2.0, 0.1, 2

# COMMAND ----------

# MAGIC %md
# MAGIC ## The data
# MAGIC A row has a real point and noise. The point is the label. The trained model turns the noise into a
# MAGIC generated point.

# COMMAND ----------

center = 2 * math.pi / 8 * F.floor(8 * F.rand(1))
rows = spark.range(ROWS).select(
    F.array(
        RADIUS * F.cos(center) + DEVIATION * F.randn(2), RADIUS * F.sin(center) + DEVIATION * F.randn(3)
    ).alias("point"),
    F.array(*(F.randn(4 + number) for number in range(NOISE))).alias("noise"),
)

# COMMAND ----------

# MAGIC %md
# MAGIC ## The networks and the step
# MAGIC Wasserstein GAN with gradient penalty (Gulrajani et al. 2017): the critic takes two steps per batch.
# MAGIC `step.mean` is a mean over the rows of all workers. `step.randn` gives a row the same noise on any
# MAGIC number of workers. `step.minimize` takes the step of one optimizer on all workers.

# COMMAND ----------


def layers(inputs, outputs, width=64):
    return nn.Sequential(
        nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, outputs)
    )


class Gan(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator, self.critic = layers(NOISE, 2), layers(2, 1)

    def forward(self, noise):
        return self.generator(noise)


def optimizers(gan):
    return {
        name: torch.optim.Adam(network.parameters(), lr=2e-3, betas=(0.5, 0.9))
        for name, network in (("generator", gan.generator), ("critic", gan.critic))
    }


def training_step(step):
    gan, (real,) = step.module, step.labels
    for _ in range(CRITIC_STEPS):
        fake = gan.generator(step.randn(NOISE)).detach()
        mixed = real + step.rand(1) * (fake - real)
        mixed.requires_grad_()
        (slope,) = torch.autograd.grad(gan.critic(mixed).sum(), mixed, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square()
        distance = (gan.critic(real) - gan.critic(fake))[:, 0]
        step.minimize(step.mean(penalty - distance), "critic")
    step.log("distance", distance)
    step.minimize(step.mean(-gan.critic(gan.generator(step.randn(NOISE)))[:, 0]), "generator")


# COMMAND ----------

torch.manual_seed(0)
model = TorchEstimator(
    model=Gan(),
    optimizer=optimizers,
    trainingStep=training_step,
    featuresCol="noise",
    labelCols=["point"],
    predictionCol="generated",
    numWorkers=WORKERS,
    batchSize=BATCH,
    epochs=EPOCHS,
    seed=0,
).fit(rows)
for record in model.summary.epochs:
    print(f"epoch {record.epoch}: distance {record.metrics['train_distance']:.3f}")

# COMMAND ----------

# MAGIC %md
# MAGIC ## Modes covered
# MAGIC As in Srivastava et al. 2017 ("VEEGAN"), of 2,500 generated points, a point within three standard
# MAGIC deviations of a center is good. In the paper a center is covered if it has one good point. Here it
# MAGIC needs 25 good points.

# COMMAND ----------

generated = np.array(
    [row.generated for row in model.transform(rows.limit(2500)).select("generated").collect()]
)
angles = 2 * np.pi / 8 * np.arange(8)
centers = RADIUS * np.stack([np.cos(angles), np.sin(angles)], axis=1)
distances = np.linalg.norm(generated[:, None] - centers[None], axis=2)
good = distances.min(axis=1) < 3 * DEVIATION
counts = np.bincount(distances.argmin(axis=1)[good], minlength=8)
covered = int((counts >= 25).sum())
print(f"modes covered: {covered} of 8; good points: {good.mean():.0%}")
