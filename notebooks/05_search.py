# Databricks notebook source
# MAGIC %md
# MAGIC # Searching settings
# MAGIC
# MAGIC One short training finds a learning rate. Then trials train in parallel on one copy of the rows, and
# MAGIC a pruner stops the bad ones early. Rows that no trial has seen judge the best one.
# MAGIC
# MAGIC Needs `ringspark` with its `search` extra on the cluster (`%pip install ringspark[search]`).

# COMMAND ----------

import os
import tempfile

from pyspark.ml.evaluation import BinaryClassificationEvaluator
from pyspark.sql import functions as F

from ringspark.estimators import TorchClassifier
from ringspark.extras.search import Choice, OptunaSearch, Uniform
from ringspark.extras.tuning import lr_range_test
from ringspark.models import ModelSpec

# A folder that the driver and all workers reach.
FOLDER = "/dbfs/tmp/ringspark-search" if os.path.isdir("/dbfs/tmp") else tempfile.mkdtemp(prefix="search-")
TRIALS = 12

# COMMAND ----------

# MAGIC %md
# MAGIC ## Rows
# MAGIC Each row has two numbers. The label says whether this point lies in one of two rings, so no straight
# MAGIC line separates the classes.

# COMMAND ----------


def number(salt):
    """A number from -1 to 1 that is the same in every run: a hash of the row's id."""
    return F.pmod(F.xxhash64("id", F.lit(salt)), F.lit(2_000_001)) / 1_000_000 - 1


points = spark.range(0, 4000, 1, 4).select("id", number(1).alias("a"), number(2).alias("b"))
radius = F.sqrt(F.col("a") ** 2 + F.col("b") ** 2)
label = (F.pmod(F.floor(radius * 3), F.lit(2)) == 1).cast("int").alias("label")
rows = points.select("id", F.array("a", "b").alias("features"), label).cache()
train, test = rows.where("id % 5 > 0"), rows.where("id % 5 = 0")
train.groupBy("label").count().show()

# COMMAND ----------

# MAGIC %md
# MAGIC ## A learning rate
# MAGIC One training raises the rate by the same factor in each step, until the loss diverges.

# COMMAND ----------

network = TorchClassifier(
    model=ModelSpec("mlp", {"in_features": 2, "hidden": [32, 32], "out_features": 2}),
    batchSize=128,
    epochs=9,
    validationFraction=0.2,
    metrics=["auroc"],
    storageUri=FOLDER,
    showProgress=False,
)
found = lr_range_test(network, train, lowest=1e-5, highest=10.0, steps=60)
print(f"suggestion {found.suggestion:.1e}; diverges at {found.diverges_at}")
found.table.tail(3)

# COMMAND ----------

# MAGIC %md
# MAGIC ## Trials
# MAGIC The space names settings of the estimator, and arguments of the network as `model.x`. The rows are
# MAGIC written once for all trials. After each epoch the pruner compares the trials. A pruned trial frees
# MAGIC its slots for the next one. With a `runUri` you can resume the search if its driver dies.

# COMMAND ----------

search = OptunaSearch(
    estimator=network,
    space={
        "learningRate": Uniform(1e-4, 1e-1, log=True),
        "model.hidden": Choice([[8], [32, 32], [64, 64]]),
        "batchSize": Choice([64, 128, 256]),
    },
    monitor="validation_auroc",
    numTrials=TRIALS,
    parallelism=2,
    sampler="random",
    pruner="halving",
    seed=3,
    runUri=f"{FOLDER}/first",
)
model = search.fit(train)
model.trials

# COMMAND ----------

epochs = int(model.trials["epochs"].sum())
print(f"{epochs} of {TRIALS * 9} epochs were trained; the best settings: {model.bestParams}")
auc = BinaryClassificationEvaluator(rawPredictionCol="probability").evaluate(model.transform(test))
print(f"ROC AUC of rows that no trial has seen: {auc:.3f}")

# COMMAND ----------

# MAGIC %md
# MAGIC ## More trials
# MAGIC The same search with a larger `numTrials` continues, and repeats no finished trial.

# COMMAND ----------

more = search.copy({search.numTrials: TRIALS + 1}).fit(train)
print(len(more.trials), more.bestParams)
