# Databricks notebook source
# MAGIC %md
# MAGIC # A network that reads text
# MAGIC
# MAGIC Which package of Python's standard library does a docstring belong to? `Tokens` turns a string
# MAGIC column into a tokenizer's ids, both in `fit` and in `transform`. The predicted classes are strings
# MAGIC again.
# MAGIC
# MAGIC Needs `ringspark` with its `text` extra on the cluster (`%pip install ringspark[text]`),
# MAGIC and this notebook in a Git folder with the repository.

# COMMAND ----------

import os
import sys
import tempfile

from pyspark.ml import Pipeline, PipelineModel
from pyspark.sql import functions as F

sys.path.append(os.path.abspath("../examples/flights"))
import docstrings
from ringspark.estimators import TorchClassifier
from ringspark.models import ModelSpec
from ringspark.pipelines import Tokens, train_tokenizer

# A folder that the driver and all workers reach, and the number of packages to distinguish.
FOLDER = "/dbfs/tmp/ringspark" if os.path.isdir("/dbfs/tmp") else tempfile.mkdtemp(prefix="text-")
PACKAGES = 8
# Spark takes a bare path as a DBFS path, not as a local one.
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
# MAGIC This one learns from the training texts. `Tokens.of` also takes a Hugging Face tokenizer, as an
# MAGIC object or as a folder that `save_pretrained` wrote. Texts longer than 64 tokens are truncated.

# COMMAND ----------

tokens = Tokens.of(train_tokenizer(train, "text", vocab_size=4000), max_length=64)
tokens

# COMMAND ----------

# MAGIC %md
# MAGIC ## The network
# MAGIC The column becomes two arguments: the ids, padded to the longest text of the batch, and the mask.
# MAGIC The first network to try averages the tokens' embeddings. `"transformer_classifier"` takes the same
# MAGIC arguments.

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
