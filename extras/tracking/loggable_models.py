"""Prints the list that makes `mlflow.pyspark.ml.autolog()` log our fitted models in addition to Spark's.

python -m ringspark.extras.tracking.loggable_models > loggable_models.txt
spark-submit --conf spark.mlflow.pysparkml.autolog.logModelAllowlistFile=loggable_models.txt ...
"""

from __future__ import annotations

from importlib.resources import files

# MLflow understands one star at the end.
OURS = ("ringspark.estimators.*", "ringspark.extras.*")


def lines() -> list[str]:
    try:
        known = files("mlflow.pyspark.ml").joinpath("log_model_allowlist.txt").read_text()
    except (ImportError, FileNotFoundError):
        raise ValueError(
            "the list of loggable models needs the whole package mlflow; pip install mlflow"
        ) from None
    return [*known.splitlines(), "", "# ringspark", *OURS]


if __name__ == "__main__":
    print("\n".join(lines()))
