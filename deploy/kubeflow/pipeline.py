"""A Kubeflow pipeline: one component trains from a job file, the next component predicts rows.

    python pipeline.py        # writes pipeline.yaml for `kfp pipeline create`

Set IMAGE to an image with ringspark, such as the image of deploy/docker. All paths must be on storage that
every pod reaches. The job file must set `save.overwrite: true`, so that the next run replaces the model.
Without `params.runUri` a retry trains again from the start; to resume, a retry needs the option `--resume` of
`ringspark train`, and every run of the pipeline its own `params.runUri`.

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
    trained.set_retry(2)
    return score(model=trained.output, rows=rows, predictions=predictions).output


if __name__ == "__main__":
    compiler.Compiler().compile(train_and_score, "pipeline.yaml")
