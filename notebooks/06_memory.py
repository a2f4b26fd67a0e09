# Databricks notebook source
# MAGIC %md
# MAGIC # A network that does not fit, made to fit
# MAGIC
# MAGIC Plan the memory of a training step before it runs, compare what each technique saves and costs, and
# MAGIC train the same network within a budget.
# MAGIC
# MAGIC Needs `ringspark` on the cluster (`%pip install ringspark`).

# COMMAND ----------

import os
import tempfile

import pandas as pd
import torch
from pyspark.sql import functions as F

from ringspark.estimators import TorchClassifier, plan_memory
from ringspark.models import ModelSpec

# A folder that the driver and all workers reach.
FOLDER = "/dbfs/tmp/ringspark-memory" if os.path.isdir("/dbfs/tmp") else tempfile.mkdtemp(prefix="memory-")

# COMMAND ----------

# MAGIC %md
# MAGIC ## What a step keeps
# MAGIC A step keeps the parameters, their gradients, the optimizer's state, and the activations that the
# MAGIC backward pass needs. The plan runs one step on meta tensors, so it allocates nothing.

# COMMAND ----------

TOKENS, WORDS = 48, 200
network = ModelSpec(
    "transformer_classifier",
    {"vocab_size": WORDS, "out_features": 2, "dim": 64, "depth": 8, "num_heads": 4, "max_seq_len": TOKENS},
)
ROWS = 64
batch = (((ROWS, TOKENS), "int64"), ((ROWS,), "int64"))
plan = plan_memory(network, batch, optimizer="adamw")
print(plan.table())

# COMMAND ----------

# MAGIC %md
# MAGIC ## What would help
# MAGIC Gradient checkpointing keeps only the inputs of blocks. Gradient accumulation computes some of the
# MAGIC rows at a time. Activation compression keeps activations in 8 bits. An optimizer with less state
# MAGIC helps if a network has many parameters; this network has few.

# COMMAND ----------

TECHNIQUES = {
    "nothing": {},
    "recompute by segments": {"gradientCheckpointing": "sqrt"},
    "recompute every block": {"gradientCheckpointing": "all"},
    "4 micro-batches": {"gradientAccumulation": 4},
    "activations in 8 bits": {"activationCompression": "int8"},
    "adafactor": {"optimizer": "adafactor"},
    "all blocks and 4 micro-batches": {"gradientCheckpointing": "all", "gradientAccumulation": 4},
}
planned = {
    name: plan_memory(network, batch, **{"optimizer": "adamw"} | settings).peak / 2**20
    for name, settings in TECHNIQUES.items()
}
table = pd.DataFrame({"MiB of a step": planned}).round(1)
table

# COMMAND ----------

# MAGIC %md
# MAGIC ## A budget
# MAGIC With a budget the plan lists the settings that fit, the cheapest first. `fit` refuses settings that
# MAGIC do not fit.

# COMMAND ----------

budget = int(planned["nothing"] * 0.5) * 2**20
advice = plan_memory(network, batch, optimizer="adamw", budget=budget)
print(advice.verdict)

words = F.transform(
    F.sequence(F.lit(0), F.lit(TOKENS - 1)), lambda i: F.pmod(F.xxhash64("id", i), F.lit(WORDS))
)
rows = spark.range(1024).select("id", words.cast("array<int>").alias("words"))
rows = rows.withColumn(
    "label", (F.aggregate("words", F.lit(0), lambda a, w: a + w) > TOKENS * WORDS / 2).cast("int")
)
estimator = TorchClassifier(
    model=network,
    inputCols=["words"],
    optimizer="adamw",
    batchSize=ROWS,
    epochs=1,
    memoryBudget=budget,
    storageUri=FOLDER,
)
try:
    estimator.fit(rows)
    refusal = ""
except ValueError as error:
    refusal = str(error)
print(refusal)

# COMMAND ----------

# MAGIC %md
# MAGIC ## The same training, smaller
# MAGIC Gradient checkpointing changes no number: the weights are bitwise equal. It costs one more forward
# MAGIC pass.

# COMMAND ----------

small = estimator.copy({estimator.gradientCheckpointing: "all"}).fit(rows)
plain = estimator.copy()
plain.clear(plain.memoryBudget)
whole = plain.fit(rows)
pairs = zip(small.module().parameters(), whole.module().parameters(), strict=True)
equal = all(torch.equal(left, right) for left, right in pairs)
print(f"weights are equal to the bit: {equal}")
print(f"seconds: {small.summary.seconds:.1f} with recomputing, {whole.summary.seconds:.1f} without")
