"""The command `ringspark` as a process: help, completion, refusals, run folders."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from written_shards import written

from ringspark.estimators.training.history import EpochRecord
from ringspark.jobs import command
from ringspark.jobs.outputs import mark_output, new_output, remove_output
from ringspark.jobs.row_source import RowSource
from ringspark.pipelines.folder_removal import check_removal

JOB = """stage: TorchRegressor
data:
  parquet: {folder}/rows
features:
  x: array(double(id) / 64)
  y: double(id) / 32
params:
  model:
    target: linear
    kwargs: {{in_features: 1, out_features: 1}}
  featuresCol: x
  labelCol: y
  batchSize: 16
  numWorkers: 2
  runUri: {folder}/run
  metrics: [rmse]
save:
  model: {folder}/model
evaluation:
  data:
    parquet: {folder}/rows
"""


def _run(*options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ringspark.jobs.command", *map(str, options)]
    return subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)


def _job(folder: Path, old: str = "", new: str = "", name: str = "job.yaml") -> Path:
    text = JOB.format(folder=folder)
    assert old in text
    path = folder / name
    path.write_text(text.replace(old, new, 1) if old else text)
    return path


def _run_folder(folder: Path, *, finished: bool = False, hours: float = 0.0) -> Path:
    for name in ["owner.json", "run.json", *(["result.json"] if finished else [])]:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")
        changed = time.time() - hours * 3600
        os.utime(folder / name, (changed, changed))
    return folder


HEAVY = """
import sys
from ringspark.jobs import command
try:
    command.main([sys.argv[1], *sys.argv[2:]])
except SystemExit:
    pass
print([name for name in ("pyspark", "torch", "numpy", "pyarrow") if name in sys.modules], file=sys.stderr)
"""


@pytest.mark.extras
@pytest.mark.parametrize("options", [["--help"], ["train", "--help"], ["--print-completion", "bash"]])
def test_help_and_completion_import_neither_spark_nor_torch(options: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", HEAVY, *options], capture_output=True, text=True, check=True)
    assert done.stderr == "[]\n"
    assert "ringspark" in done.stdout


@pytest.mark.extras
def test_bash_completes_commands_and_options(tmp_path: Path) -> None:
    (tmp_path / "complete").write_text(_run("--print-completion", "bash").stdout)
    script = (
        f"source {tmp_path}/complete; COMP_WORDS=($1); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); "
        '_shtab_ringspark; echo "${COMPREPLY[@]}"'
    )
    for words, found in (("ringspark ru", "runs"), ("ringspark runs re", "remove")):
        done = subprocess.run(["bash", "-c", script, "-", words], capture_output=True, text=True, check=True)
        assert done.stdout.split() == [found]


@pytest.mark.extras
@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "batchSize",
            "batchSise",
            "line 13: TorchRegressor has no Param 'batchSise'; did you mean 'batchSize'",
        ),
        ("batchSize: 16", "batchSize: many", "line 13: batchSize must be a whole number, got 'many'"),
        ("numWorkers: 2", "numWorkers: 0", "line 14: numWorkers must be at least 1, got 0"),
        ("in_features: 1", "in_featurs: 1", "line 8: model 'linear' does not take these arguments"),
        ("save:", "saves:", "line 17: a job has no key 'saves'; did you mean 'save'?"),
        ("  parquet", "  parket", "line 3: data has no key 'parket'; did you mean 'parquet'?"),
        ("stage: TorchRegressor", "stage: Torch", "line 1: stage must be one of"),
        ("runUri:", "labelCol:", "line 15: 'labelCol' is a duplicate key; remove one"),
        ("features:", "features", "this is not YAML"),
        ("  metrics: [rmse]\n", "", "line 18: evaluation needs params.metrics"),
        ("evaluation:\n  data:\n    parquet", "evaluation:\n  data:\n    shards", "cannot be shards"),
    ],
)
def test_a_mistake_in_a_job_file_is_one_sentence_with_its_line(tmp_path, old, new, message, capsys):
    assert command.main(["train", str(_job(tmp_path, old, new))]) == 2
    error = capsys.readouterr().err
    assert error.startswith("ringspark train: error: job.yaml")
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.extras
def test_a_refused_job_is_a_process_that_prints_one_line_and_exits_with_2(tmp_path: Path) -> None:
    done = _run("train", _job(tmp_path, "batchSize", "batchSise"))
    assert done.returncode == 2
    assert done.stderr.startswith("ringspark train: error: job.yaml, line 13: ")
    assert (done.stdout, done.stderr.count("\n")) == ("", 1)


@pytest.mark.slow
def test_a_printed_job_is_a_job_again_and_json_is_read_alike(tmp_path: Path) -> None:
    from ruamel.yaml import YAML

    job = _job(tmp_path)
    (tmp_path / "job.json").write_text(json.dumps(YAML(typ="safe").load(job.read_text()), indent=1))
    first = _run("train", job, "--set", "params.epochs=7", "--print")
    assert first.returncode == 0, first.stderr
    assert "epochs: 7\n" in first.stdout
    (tmp_path / "printed.yaml").write_text(first.stdout)
    assert _run("train", tmp_path / "printed.yaml", "--print").stdout == first.stdout
    assert _run("train", tmp_path / "job.json", "--set", "params.epochs=7", "--print").stdout == first.stdout


@pytest.mark.slow
def test_runs_are_listed_and_only_what_is_a_run_and_not_in_use_is_removed(tmp_path: Path) -> None:
    done = _run_folder(tmp_path / "done", finished=True)
    busy, dead = _run_folder(tmp_path / "busy"), _run_folder(tmp_path / "dead", hours=2)
    other = _run_folder(tmp_path / "other", finished=True)
    (other / "thesis.tex").write_text("")
    epochs = [EpochRecord(epoch=1, steps=2, rows=32, seconds=0.5, learning_rate=0.1, train_loss=0.25,
                          validation_loss=None, metrics={"validation_f1": 0.0})]  # fmt: skip
    (done / "history.json").write_text(json.dumps([asdict(record) for record in epochs]))
    shown = _run("runs", "show", done).stdout
    header = next(line.split() for line in shown.splitlines() if "train_loss" in line)
    assert "validation_f1" in header, "a metric that was 0 was measured"
    assert "validation_loss" not in header
    listed = _run("runs", "list", tmp_path)
    states = {line.split()[0]: line for line in listed.stdout.splitlines()}
    assert "finished" in states["done"]
    assert "in use" in states["busy"]
    assert "stopped" in states["dead"]
    for folder, message, options in (
        (done, "not removed without confirmation; give --yes", []),
        (busy, "its driver may be alive; stop it and give --stopped", ["--yes"]),
        (other, "holds 'thesis.tex', which belongs to no run", ["--yes"]),
        (tmp_path, "is no run folder", ["--yes"]),
        (done / "run.json", "is no run folder", ["--yes"]),
    ):
        refused = _run("runs", "remove", folder, *options)
        assert (refused.returncode, refused.stderr.count("\n")) == (2, 1), refused.stderr
        assert message in refused.stderr
        assert folder.exists()
    for folder, options in ((done, []), (dead, []), (busy, ["--stopped"])):
        assert _run("runs", "remove", folder, "--yes", *options).returncode == 0
        assert not folder.exists()


@pytest.mark.extras
@pytest.mark.spark
def test_columns_may_be_written_with_spaces(spark: Any) -> None:
    from ringspark.extras.commands.score import _select

    assert _select(spark.range(1).selectExpr("id as a", "id as b", "id"), " a, b").columns == ["a", "b"]


@pytest.mark.extras
@pytest.mark.spark
def test_rows_named_by_a_pattern_are_not_written_over(spark: Any, tmp_path: Path) -> None:
    folder = tmp_path / "some days"
    for day in ("1", "2"):
        spark.range(3).write.parquet(str(folder / f"day-{day}"))
    spark.read.parquet(str(folder / "day-2")).createOrReplaceTempView("one_day")
    pattern = RowSource(parquet=str(folder / "day-*"))
    for source in (pattern, RowSource(parquet=str(folder / "day-[23]")), RowSource(table="one_day")):
        for output in (folder / "day-2", folder):
            with pytest.raises(ValueError, match=r"would be written over the rows in .*day-"):
                source.check_apart(spark, str(output))
        source.check_apart(spark, str(folder / "day"))
    with pytest.raises(ValueError, match=r"would be written over the rows in .*day-1"):
        pattern.check_apart(spark, str(folder / "day-1"))


@pytest.mark.extras
@pytest.mark.spark
def test_rows_behind_a_link_are_not_written_over(spark: Any, tmp_path: Path) -> None:
    spark.range(3).write.parquet(str(tmp_path / "disk" / "rows"))
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    for rows, output in (
        *[("disk/rows", "link/rows"), ("disk/rows", "disk/rows/new.json")],
        *[("link/rows", "disk/rows"), ("link/rows", "disk")],
    ):
        with pytest.raises(ValueError, match=r"would be written over the rows in .*rows"):
            RowSource(parquet=str(tmp_path / rows)).check_apart(spark, str(tmp_path / output))
    RowSource(parquet=str(tmp_path / "link/rows")).check_apart(spark, str(tmp_path / "disk/predictions"))
    # A folder inside the table may be a link, too.
    (tmp_path / "table").mkdir()
    (tmp_path / "table" / "day=1").symlink_to(tmp_path / "disk" / "rows")
    with pytest.raises(ValueError, match=r"would be written over the rows in .*day=1"):
        RowSource(parquet=str(tmp_path / "table")).check_apart(spark, str(tmp_path / "disk"))


@pytest.mark.spark
def test_a_failed_write_of_a_job_leaves_no_folder(spark: Any, tmp_path: Path) -> None:
    output = str(tmp_path / "predictions")
    with pytest.raises(Exception, match="no row"), new_output(output, "score"):
        spark.range(3).selectExpr("if(id < 2, id, raise_error('no row'))").write.parquet(output)
    assert not Path(output).exists()
    with new_output(output, "score"):
        spark.range(3).write.parquet(output)
    with pytest.raises(Exception, match="PATH_ALREADY_EXISTS"), new_output(output, "score"):
        spark.range(3).write.parquet(output)
    # An error before Spark looks at the folder removes nobody's rows.
    foreign = str(tmp_path / "foreign")
    spark.range(3).write.parquet(foreign)
    with pytest.raises(ValueError, match="early"), new_output(foreign, "score"):
        raise ValueError("early")
    assert spark.read.parquet(foreign).count() == 3


@pytest.mark.spark
def test_a_job_replaces_only_what_it_wrote(spark: Any, tmp_path: Path) -> None:
    output = tmp_path / "predictions"
    spark.range(3).write.parquet(str(output))
    with pytest.raises(ValueError, match=r"no '_ringspark.json' in it shows that this run or job made it"):
        remove_output(str(output), "score")
    mark_output(str(output), "score")
    (output / "notes.txt").write_text("")
    with pytest.raises(ValueError, match=r"holds 'notes.txt', which ringspark did not write there"):
        remove_output(str(output), "score")
    (output / "notes.txt").unlink()
    with pytest.raises(ValueError, match=r"no '_ringspark.json' in it shows that this run or job made it"):
        remove_output(str(output), "etl", check_removal)
    assert spark.read.parquet(str(output)).count() == 3
    remove_output(str(output), "score")
    assert not output.exists()


@pytest.mark.extras
@pytest.mark.spark
@pytest.mark.parametrize(
    "input_of", ["pretrained", "teacher", "initialModel", "evaluation", "metrics", "nobody"]
)
def test_a_saved_job_does_not_write_over_its_inputs(spark, tmp_path, input_of, capsys):
    output = tmp_path / "kept"
    output.mkdir()
    (output / "thesis.tex").write_text("")
    spark.range(64).write.parquet(str(tmp_path / "rows"))
    setting = {"pretrained": f"  pretrained: {{uri: {output}/a}}\n", "teacher": f"  teacher: {output}\n"}
    setting["initialModel"] = f"  initialModel: {output}\n"
    changed = f"{setting.get(input_of, '')}save:\n  overwrite: true\n  model: {output}"
    if input_of in ("evaluation", "metrics"):
        teacher = f"  teacher: {output}\n" if input_of == "evaluation" else ""
        changed = f"{teacher}save:\n  model: {tmp_path}/model"
    job = _job(tmp_path, f"save:\n  model: {tmp_path}/model", changed)
    written = {"evaluation": f"{output}/a.json", "metrics": f"{tmp_path}/model"}
    if input_of in written:
        text = job.read_text()
        job.write_text(text.replace("evaluation:\n", f"evaluation:\n  output: {written[input_of]}\n"))
    assert command.main(["train", str(job)]) == 2
    message = {
        "pretrained": "would be written over the pretrained weights",
        "teacher": "would be written over the teacher",
        "initialModel": "would be written over the initial model",
        "evaluation": r"evaluation.output: .*/kept/a.json would be written over the teacher",
        "metrics": r"evaluation.output: .*/model would be written over the model",
        "nobody": "is kept, because it holds 'thesis.tex'",
    }
    assert re.search(message[input_of], capsys.readouterr().err)
    assert (output / "thesis.tex").exists()


@pytest.mark.extras
@pytest.mark.spark
@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("absent", "Spark cannot read parquet"),
        ("featureless", "features cannot be computed"),
        ("unlabelled", "labelCol 'y' is not a column"),
    ],
)
def test_rows_that_cannot_be_evaluated_are_refused_before_the_training(
    spark, tmp_path, rows, message, capsys
):
    spark.range(64).selectExpr("id", "double(id) AS y").write.parquet(str(tmp_path / "rows"))
    spark.range(64).toDF("y").write.parquet(str(tmp_path / "featureless"))
    spark.range(64).write.parquet(str(tmp_path / "unlabelled"))
    evaluated = f"evaluation:\n  data:\n    parquet: {tmp_path}"
    job = _job(tmp_path, f"{evaluated}/rows", f"{evaluated}/{rows}")
    job.write_text(job.read_text().replace("  y: double(id) / 32\n", ""))
    assert command.main(["train", str(job)]) == 2
    assert re.search(rf"job.yaml, line \d+: evaluation.data: .*{message}", capsys.readouterr().err)
    assert not (tmp_path / "run").exists()


@pytest.mark.extras
@pytest.mark.spark
@pytest.mark.parametrize("search", ["population.json", "shards-0123456789ab"])
def test_the_folder_of_a_search_is_refused_and_stays(spark, tmp_path, search, capsys):
    spark.range(64).write.parquet(str(tmp_path / "rows"))
    (tmp_path / "run" / search).mkdir(parents=True)
    (tmp_path / "run" / "owner.json").write_text("{}")
    for options in ([], ["--resume"], ["--no-resume"]):
        assert command.main(["train", str(_job(tmp_path)), *options]) == 2
        assert f"holds '{search}', which" in capsys.readouterr().err
        assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["owner.json", search]


@pytest.mark.slow
@pytest.mark.spark
def test_an_evaluation_that_fails_after_the_training_is_no_refusal(spark: Any, tmp_path: Path) -> None:
    spark.range(64).write.parquet(str(tmp_path / "rows"))
    job = _job(tmp_path)
    with job.open("a") as file:
        file.write(f"  output: {tmp_path}/file/metrics.json\n")
    (tmp_path / "file").touch()
    told = f"the model is saved to {tmp_path}/model, but its evaluation failed: "
    with pytest.raises(SystemExit, match=told):
        command.main(["train", str(job)])  # SystemExit with a message has exit code 1
    assert (tmp_path / "model").exists()


@pytest.mark.slow
@pytest.mark.spark
def test_a_job_is_trained_planned_shown_and_scored(spark: object, tmp_path: Path) -> None:
    spark.range(64).write.parquet(str(tmp_path / "rows"))
    job = _job(tmp_path)
    trained = _run("train", job)
    assert trained.returncode == 0, trained.stderr
    assert f"train: model saved to {tmp_path}/model" in trained.stdout
    assert re.search(r"^train: \w+ [0-9.]+$", trained.stdout, re.MULTILINE), "the metrics of the evaluation"
    again = _run("train", job)
    assert again.returncode == 2
    assert "job.yaml, line 18: save.model: " in again.stderr
    # A refused command removes nothing: neither the existing run nor the files that it would overwrite.
    for file, what, message in (
        (_job(tmp_path, "labelCol: y", "labelCol: z", "a.yaml"), "z", "labelCol"),
        (_job(tmp_path, "/model", "/rows", "b.yaml"), "rows", "would be written over the rows"),
    ):
        refused = _run("train", file, "--set", "save.overwrite=true", "--no-resume")
        assert refused.returncode == 2, what
        assert message in refused.stderr, what
    for place in ("rows", "model"):
        again = _run("score", tmp_path / "model", "--parquet", tmp_path / "rows",
                     "--output", tmp_path / place, "--overwrite")  # fmt: skip
        assert f"would be written over the {place}" in again.stderr
    assert (tmp_path / "run" / "result.json").exists()
    assert spark.read.parquet(str(tmp_path / "rows")).count() == 64
    assert "batchSize = 16" in _run("runs", "show", tmp_path / "run").stdout
    assert "rows per step on each of 2 workers" in _run("plan", job).stdout
    scored = _run("score", tmp_path / "model", "--parquet", tmp_path / "rows", "--output", tmp_path / "out")
    assert scored.returncode == 0, scored.stderr
    written = spark.read.parquet(str(tmp_path / "out"))
    assert (written.count(), "prediction" in written.columns) == (64, True)


TABLE_JOB = """stage: TorchRegressor
data:
  {source}
params:
  labelCol: y
  timeCol: id
  epochs: 2
  collective: torch
  showProgress: false
  metrics: [rmse]
  runUri: {folder}/run
save:
  model: {folder}/model
evaluation:
  data:
    parquet: {folder}/rows
"""


@pytest.mark.extras
@pytest.mark.parametrize(
    ("source", "what"),
    [("shards: rows", "shards"), ("{delta: rows, inPlace: true}", "tables with inPlace")],
)
def test_rows_that_spark_does_not_read_need_a_model(tmp_path, source, what, capsys):
    job = tmp_path / "job.yaml"
    job.write_text(TABLE_JOB.format(folder=tmp_path, source=source))
    for name in ("train", "plan"):
        assert command.main([name, str(job)]) == 2
        assert f"job.yaml, line 2: data: with {what}, set params.model, because" in capsys.readouterr().err


@pytest.mark.extras
def test_a_plan_divides_the_batch_by_the_replicas_of_the_mesh(tmp_path, capsys):
    written(tmp_path / "shards", {"x": np.zeros((64, 2), np.float32), "y": np.zeros(64, np.float32)})
    job = tmp_path / "job.yaml"
    network = '{"target": "mlp", "kwargs": {"in_features": 2, "hidden": [8, 8], "out_features": 1}}'
    job.write_text(
        f"stage: TorchRegressor\ndata: {{shards: {tmp_path}/shards}}\nparams: {{model: {network}, "
        "labelCol: y, featuresCol: x, batchSize: 32, numWorkers: 4, parallelism: {tensor: 2}, "
        f"collective: torch, runUri: {tmp_path}/run}}\nsave: {{model: {tmp_path}/model}}\n"
    )
    assert command.main(["plan", str(job)]) in (0, None)
    assert "plan: 16 rows per step on each of 4 workers" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.filterwarnings("ignore:left out of the table:UserWarning")
def test_a_job_without_a_model_is_planned_printed_and_trained(spark, tmp_path, capsys):
    spark.range(400).selectExpr("id", "sin(id) AS x", "cos(id) AS y").write.parquet(str(tmp_path / "rows"))
    job = tmp_path / "job.yaml"
    job.write_text(TABLE_JOB.format(folder=tmp_path, source=f"parquet: {tmp_path}/rows"))
    assert command.main(["plan", str(job)]) in (0, None)
    assert "plan: 32 rows per step on each of 1 workers" in capsys.readouterr().out
    assert command.main(["train", str(job), "--print"]) in (0, None)
    printed = capsys.readouterr().out
    assert "timeCol: id" in printed
    assert not re.search("batchSize|featuresCol", printed), "they would replace what fit chooses"
    job.write_text(printed)
    assert command.main(["train", str(job)]) in (0, None)
    assert "train: rmse" in capsys.readouterr().out
    refused = ["train", str(job), "--set", "params.labelCol=z", "--set", "save.overwrite=true", "--no-resume"]
    assert command.main(refused) == 2
    assert "labelCol 'z' is not a column" in capsys.readouterr().err
    assert (tmp_path / "run" / "result.json").exists()


@pytest.mark.spark
@pytest.mark.telling
def test_the_demo_saves_a_model_that_predicts(tmp_path: Path) -> None:
    done = _run("demo", "--output", tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "model" / "metadata").is_dir()
    auc = re.search(r"ROC AUC on all [\d,]+ held-out trips: (0\.\d+)", done.stdout)
    assert auc is not None
    assert float(auc[1]) > 0.75
