# Databricks notebook source
# MAGIC %md
# MAGIC # From a DataFrame to a trained network and back
# MAGIC
# MAGIC Will a flight arrive over 15 minutes late? Spark joins five real tables. Two workers train on the
# MAGIC joined table as it is: strings, numbers and missing values.
# MAGIC
# MAGIC Needs `ringspark` with its `examples` extra on the cluster (`%pip install ringspark[examples]`),
# MAGIC and this notebook in a Git folder with the repository.

# COMMAND ----------

import os
import sys
import tempfile

from pyspark.ml.evaluation import BinaryClassificationEvaluator
from pyspark.sql import functions as F

sys.path.append(os.path.abspath("../examples/flights"))
import flights
from ringspark.estimators import TorchClassifier

# A folder that the driver and all workers reach, and the share of the rows to use: 1.0 for all.
FOLDER = "/dbfs/tmp/ringspark" if os.path.isdir("/dbfs/tmp") else tempfile.mkdtemp(prefix="quickstart-")
FRACTION = 0.1
# Spark takes a bare path as a DBFS path, not as a local one.
FOR_SPARK = f"file:{FOLDER}"

# COMMAND ----------

# MAGIC %md
# MAGIC ## The table
# MAGIC The table has one row per flight, with the facts that are known before departure. Cancelled flights
# MAGIC have no label.

# COMMAND ----------

tables = flights.read_tables(spark, f"file:{flights.unpack_raw_tables(f'{FOLDER}/raw')}")
rows = flights.label_rows(flights.join_tables(tables))
rows = rows.where(F.pmod(F.xxhash64(*flights.KEYS), F.lit(1000)) < int(FRACTION * 1000)).cache()
train = rows.where("split != 'test'").withColumn("is_validation", F.col("split") == "validation")
test = rows.where("split = 'test'")
rows.groupBy("split").agg(F.count("*").alias("rows"), F.avg("label").alias("late")).show()

# COMMAND ----------

# MAGIC %md
# MAGIC ## The network
# MAGIC Without `model`, `fit` builds a network for the table. Numbers, strings and missing values need no
# MAGIC preparation. The validation rows are from the month after the training months.

# COMMAND ----------

estimator = TorchClassifier(
    inputCols=[*flights.CATEGORICAL, *flights.NUMERIC],
    validationIndicatorCol="is_validation",
    epochs=3,
    numWorkers=2,
    storageUri=f"{FOLDER}/storage",
)
model = estimator.fit(train)

# COMMAND ----------

# What the network gets of each column, and why.
model.summary.columns

# COMMAND ----------

model.summary.history

# COMMAND ----------

# MAGIC %md
# MAGIC ## Predictions
# MAGIC The model is a Spark ML stage like any other: it is lazy, and all other columns pass through.

# COMMAND ----------

predictions = model.transform(test)
predictions.select("carrier", "origin", "dest", "label", "prediction", "probability").show(5, truncate=40)
auc = BinaryClassificationEvaluator(labelCol="label").evaluate(predictions)
print(f"ROC AUC on the months after training: {auc:.3f}")

# COMMAND ----------

model.write().overwrite().save(f"{FOR_SPARK}/model")
