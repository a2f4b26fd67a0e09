# Databricks notebook source
# MAGIC %md
# MAGIC # A network that reads text
# MAGIC
# MAGIC Which package of Python's standard library is a docstring from? A string column goes in as it is:
# MAGIC `Tokens` turns it into the ids of a tokenizer, in `fit` and in `transform` alike, and the classes
# MAGIC come back as strings.
# MAGIC
# MAGIC Needs `ringspark` with its `text` extra on the cluster (`%pip install ringspark[text]`).

# COMMAND ----------

import os
import tempfile

from pyspark.ml import Pipeline, PipelineModel
from pyspark.sql import functions as F

from ringspark.estimators import TorchClassifier
from ringspark.jobs import docstrings
from ringspark.models import ModelSpec
from ringspark.pipelines import Tokens, train_tokenizer

# A folder that the driver and all workers reach, and the number of packages to tell apart.
FOLDER = "/dbfs/tmp/ringspark" if os.path.isdir("/dbfs/tmp") else tempfile.mkdtemp(prefix="text-")
PACKAGES = 8
# As Spark has to be told: a path alone is one of DBFS there, not of its mount.
FOR_SPARK = f"file:{FOLDER}"

# COMMAND ----------

# MAGIC %md
# MAGIC ## The texts
# MAGIC A fifth of them, chosen by a hash of the text, is for the test.

# COMMAND ----------

texts = docstrings.frame(spark, PACKAGES).cache()
is_test = F.pmod(F.xxhash64("text"), F.lit(5)) == 0
train, test = texts.where(~is_test), texts.where(is_test)
train.groupBy("package").count().orderBy(F.desc("count")).show()

# COMMAND ----------

# MAGIC %md
# MAGIC ## A tokenizer
# MAGIC Learnt here from the training texts. `Tokens.of` takes one of Hugging Face just as well, as an object
# MAGIC or as the folder in which `save_pretrained` left it. Texts of more than 64 tokens are cut.

# COMMAND ----------

tokens = Tokens.of(train_tokenizer(train, "text", vocab_size=4000), max_length=64)
tokens

# COMMAND ----------

# MAGIC %md
# MAGIC ## The network
# MAGIC It gets two arguments of the one column: the ids, padded to the longest text of the batch, and the
# MAGIC mask. The first network to try takes the mean of the tokens' embeddings; `"transformer_classifier"`
# MAGIC takes the same arguments.

# COMMAND ----------

network = TorchClassifier(
    model=ModelSpec(
        "embedding_mean",
        {"vocab_size": tokens.num_ids, "dim": 64, "out_features": PACKAGES, "dropout": 0.3},
    ),
    featuresCol="text",
    labelCol="package",
    columns={"text": tokens},
    epochs=10,
    batchSize=64,
    learningRate=0.01,
    lrSchedule="one_cycle",
    numWorkers=2,
    storageUri=f"{FOLDER}/storage",
)
model = Pipeline(stages=[network]).fit(train)
model.stages[-1].summary.history

# COMMAND ----------

# MAGIC %md
# MAGIC ## Predictions
# MAGIC The saved model holds the tokenizer and scores any table with a column `text`.

# COMMAND ----------

model.write().overwrite().save(f"{FOR_SPARK}/model")
loaded = PipelineModel.load(f"{FOR_SPARK}/model")
predictions = loaded.transform(test)
predictions.select("package", "predictedLabel", F.substring("text", 1, 60).alias("text")).show(5, truncate=60)
accuracy = predictions.agg(F.avg((F.col("package") == F.col("predictedLabel")).cast("double"))).first()[0]
print(f"accuracy on texts that it has not seen: {accuracy:.3f}")

# COMMAND ----------

asked = spark.createDataFrame(
    [("Send the message over SMTP.",), ("Draw a circle on the canvas.",)], "text string"
)
loaded.transform(asked).select("text", "predictedLabel").show(truncate=False)
