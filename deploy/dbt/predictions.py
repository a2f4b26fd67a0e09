"""A dbt Python model: predicts the rows of the dbt model `new_rows` with a saved Spark ML pipeline.

Put this file into `models/` of a dbt project on Spark or Databricks. In dbt_project.yml, set the path of the
pipeline, which is `save.model` of the job file that trained it:

    models:
      your_project:
        predictions: {+model_uri: "/Volumes/main/default/ringspark/model"}

The cluster needs ringspark. `transform` is lazy, so dbt reads the rows only once, when it writes the table.

Run: tests/deploy/test_orchestrators.py lets dbt parse and compile it, and calls it with a Spark session.
"""

from typing import Any


def model(dbt: Any, session: Any) -> Any:
    from pyspark.ml import PipelineModel

    dbt.config(materialized="table")
    return PipelineModel.load(dbt.config.get("model_uri")).transform(dbt.ref("new_rows"))
