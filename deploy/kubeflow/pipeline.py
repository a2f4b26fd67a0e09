"""A Kubeflow pipeline: one component trains a job file, the next one predicts rows.

    python pipeline.py        # writes pipeline.yaml for `kfp pipeline create`

IMAGE is an image with ringspark, such as that of deploy/docker. Every pod must reach the paths.

Run: tests/deploy/test_orchestrators.py compiles the pipeline, and runs it by Kubeflow's SubprocessRunner.
"""

from kfp import compiler, dsl

IMAGE = "ringspark:cpu"


@dsl.component(base_image=IMAGE)
def train(job: str, model: str) -> str:
    import subprocess

    subprocess.run(["ringspark", "train", job], check=True)
    return model


@dsl.component(base_image=IMAGE)
def score(model: str, rows: str, predictions: str) -> str:
    import subprocess

    command = ["ringspark", "score", model, "--parquet", rows, "--output", predictions, "--overwrite"]
    subprocess.run(command, check=True)
    return predictions


@dsl.pipeline(name="ringspark")
def train_and_score(job: str, model: str, rows: str, predictions: str) -> str:
    trained = train(job=job, model=model)
    trained.set_retry(2)  # a run that was interrupted resumes from its last checkpoint
    return score(model=trained.output, rows=rows, predictions=predictions).output


if __name__ == "__main__":
    compiler.Compiler().compile(train_and_score, "pipeline.yaml")
