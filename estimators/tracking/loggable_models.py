"""The list by which `mlflow.pyspark.ml.autolog()` logs our fitted models beside Spark's own.

    python -m ringspark.estimators.tracking.loggable_models > loggable_models.txt
    spark-submit --conf spark.mlflow.pysparkml.autolog.logModelAllowlistFile=loggable_models.txt ...

Without it autolog logs parameters and metrics of a pipeline with our stages, and warns that the model is left
out. A list of your own replaces MLflow's, so this one begins with that of the MLflow that is installed.
"""

from __future__ import annotations

from importlib.resources import files

# One star at the end is what MLflow understands.
OURS = ("ringspark.estimators.*", "ringspark.extras.*")


def lines() -> list[str]:
    """Returns the list: a class, a prefix with a star, or a comment an entry.

    Raises:
        ValueError: MLflow is not installed.
    """
    try:
        known = files("mlflow.pyspark.ml").joinpath("log_model_allowlist.txt").read_text()
    except (ImportError, FileNotFoundError):
        raise ValueError(
            "the list of loggable models needs the whole package mlflow; pip install mlflow"
        ) from None
    return [*known.splitlines(), "", "# ringspark", *OURS]


if __name__ == "__main__":
    print("\n".join(lines()))
