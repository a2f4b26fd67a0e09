# Databricks notebook source
# MAGIC %md
# MAGIC # When something fails
# MAGIC
# MAGIC This notebook kills one worker in the middle of a training, and then the whole training. The results
# MAGIC equal an undisturbed training. At the end it shows some errors.
# MAGIC
# MAGIC Needs `ringspark` on the cluster (`%pip install ringspark`).

# COMMAND ----------

import os
import signal
import tempfile
from pathlib import Path

import torch
from pyspark.sql import functions as F

from ringspark.estimators import Callback, TorchClassifier, WorkerError
from ringspark.models import ModelSpec

# A folder that the driver and all workers reach.
FOLDER = "/dbfs/tmp/ringspark-faults" if os.path.isdir("/dbfs/tmp") else tempfile.mkdtemp(prefix="faults-")

# COMMAND ----------

# MAGIC %md
# MAGIC ## A training of 80 steps
# MAGIC Two workers train, and write a checkpoint every 5 steps.

# COMMAND ----------

rows = spark.range(0, 2000, 1, 4).selectExpr("id", "sin(id) AS a", "cos(1.3 * id) AS b")
rows = rows.select(
    F.array("a", "b").alias("features"), (F.col("a") + F.col("b") > 0).cast("int").alias("label")
)
network = TorchClassifier(
    model=ModelSpec("mlp", {"in_features": 2, "hidden": [32], "out_features": 2}),
    batchSize=100,
    epochs=4,
    learningRate=0.01,
    numWorkers=2,
    collective="torch",
    checkpointEverySteps=5,
    storageUri=FOLDER,
    showProgress=False,
)
undisturbed = network.fit(rows)
print(undisturbed.summary.history[["epoch", "train_loss"]])


def same(model):
    """Returns whether the weights are bitwise equal to the weights of the undisturbed training."""
    pairs = zip(model.module().parameters(), undisturbed.module().parameters(), strict=True)
    return all(torch.equal(left, right) for left, right in pairs)


# COMMAND ----------

# MAGIC %md
# MAGIC ## One worker is killed
# MAGIC At step 47 the process of worker 1 gets signal 9, which it cannot catch. The driver notices and
# MAGIC starts both workers again. They resume from the last checkpoint.

# COMMAND ----------


class KilledOnce(Callback):
    def __init__(self, file):
        self.file = Path(file)

    def on_step_end(self, state):
        if state.rank == 1 and state.step == 47 and not self.file.exists():
            self.file.touch()
            print("about to be killed", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)


killed = network.copy({network.callbacks: [KilledOnce(f"{FOLDER}/killed")]}).fit(rows)
print(killed.summary.restart_reasons[0])
print("resumed at step", killed.summary.resumed_steps)
print("the same weights:", same(killed))
print(killed.summary.logs(rank=1)[-3:])

# COMMAND ----------

# MAGIC %md
# MAGIC ## Everything ends
# MAGIC `runUri` names the folder of the training. Here the fit ends with an error, as if the driver had
# MAGIC died. The same call with `resume=True` resumes the training.

# COMMAND ----------


class EndsOnce(Callback):
    def __init__(self, file):
        self.file = Path(file)

    def on_step_end(self, state):
        if state.step == 33 and not self.file.exists():
            if state.rank == 0:
                self.file.touch()
            raise RuntimeError("the power is off")


named = network.copy({network.runUri: f"{FOLDER}/named", network.callbacks: [EndsOnce(f"{FOLDER}/ended")]})
named.clear(named.storageUri)  # the folder of the run holds everything
try:
    named.fit(rows)
    ended = ""
except WorkerError as error:
    ended = str(error).splitlines()[0]
print(ended)

resumed = named.setResume(True).fit(rows)
print("resumed at step", resumed.summary.resumed_steps)
print("the same weights:", same(resumed))

# COMMAND ----------

# MAGIC %md
# MAGIC ## Errors
# MAGIC `fit` checks the settings and columns before it starts anything. One sentence says what is wrong and
# MAGIC what to do.

# COMMAND ----------

mistakes = {
    "a mistyped column": lambda: network.copy({network.featuresCol: "feature"}).fit(rows),
    "too many workers": lambda: network.copy({network.numWorkers: 500}).fit(rows),
    "other settings for a run": lambda: named.copy({named.learningRate: 0.5}).fit(rows),
}
sentences = {}
for name, mistake in mistakes.items():
    try:
        mistake()
    except ValueError as error:
        sentences[name] = str(error)
        print(f"{name}: {error}\n")
