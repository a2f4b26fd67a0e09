"""A dbt Python model: predicts the rows of the model `new_rows` with a saved pipeline.

Put this file into `models/` of a dbt project on Spark or Databricks, and set the path in dbt_project.yml:

    models:
      your_project:
        predictions: {+model_uri: "/Volumes/main/default/ringspark/model"}

The cluster needs ringspark; transform is lazy, so dbt's own write is the only pass over the rows.

Run: tests/deploy/test_orchestrators.py lets dbt parse and compile it, and calls it with a Spark session.
"""

from typing import Any


def model(dbt: Any, session: Any) -> Any:
    from pyspark.ml import PipelineModel

    dbt.config(materialized="table")
    return PipelineModel.load(dbt.config.get("model_uri")).transform(dbt.ref("new_rows"))
