"""A job file can name every stage, and what it prints is a job again."""

from __future__ import annotations

from pathlib import Path

import jsonschema
import pytest
from ruamel.yaml import YAML

from ringspark.jobs import train_job
from ringspark.jobs.job_file import yaml_or_json

SCHEMA = Path(__file__).resolve().parents[2] / "docs" / "job.schema.json"
INNER = "{stage: TorchClassifier, params: {labelCol: y, inputCols: [a, b], epochs: 1, metrics: [auroc]}}"
PARAMS = {
    "TorchClassifier": "{labelCol: y, epochs: 2, sync: {name: zero, stage: 1}}",
    "TorchRegressor": "{labelCol: y, learningRate: 1e-3, freeze: ['?ayer.*']}",
    "TorchEstimator": "{loss: mse, model: {target: linear, kwargs: {in_features: 2, out_features: 1}}}",
    "TorchAutoencoder": "{inputCols: [a, b], mask: 0.25}",
    "OptunaSearch": f"{{estimator: {INNER}, space: {{epochs: {{choice: {{values: [1, 2]}}}}}}, numTrials: 2,"
    " evaluator: {name: BinaryClassificationEvaluator, labelCol: y}}",
    "PopulationSearch": f"{{estimator: {INNER}, space: {{alpha: {{uniform: {{low: 0, high: 1}}}}}}}}",
}


def _job(folder: Path, stage: str, params: str, **more: str) -> str:
    path = folder / f"{stage}.yaml"
    rest = "".join(f"{key}: {value}\n" for key, value in more.items())
    path.write_text(
        f"stage: {stage}\ndata: {{parquet: {folder}/rows}}\nparams: {params}\n"
        f"save: {{model: {folder}/{stage}}}\n{rest}"
    )
    return str(path)


def _printed(uri: str) -> str:
    file, job = train_job.read_job(uri)
    return yaml_or_json(train_job._fill_defaults(job, train_job.make_estimator(file, job)))


def test_every_stage_of_a_job_is_tried_here() -> None:
    assert list(PARAMS) == list(train_job.STAGES)


@pytest.mark.extras
@pytest.mark.parametrize("stage", PARAMS)
def test_a_printed_job_of_any_stage_is_the_same_job_and_fits_the_schema(tmp_path: Path, stage: str) -> None:
    job = _job(tmp_path, stage, PARAMS[stage])
    printed = tmp_path / "printed.yaml"
    printed.write_text(_printed(job))
    assert _printed(str(printed)) == printed.read_text()
    schema = jsonschema.Draft202012Validator(YAML(typ="safe").load(SCHEMA.read_text()))
    for path in (Path(job), printed):
        values = YAML(typ="safe").load(path.read_text())
        unset = [name for name, value in values["params"].items() if value is None]
        values["params"] = {name: value for name, value in values["params"].items() if name not in unset}
        assert [error.message for error in schema.iter_errors({k: v for k, v in values.items() if v})] == []


@pytest.mark.extras
@pytest.mark.parametrize(
    ("stage", "params", "more", "message"),
    [
        ("OptunaSearch", "{}", {}, "OptunaSearch needs params.estimator; add it"),
        ("OptunaSearch", "{estimator: {stage: OptunaSearch}}", {}, "params.estimator.stage must be one of"),
        ("OptunaSearch", "{estimator: {stage: TorchClassifier, params: {epoch: 1}}}", {}, "mean 'epochs'"),
        ("OptunaSearch", "{evaluator: accuracy}", {}, "evaluator must be a dict such as"),
        ("OptunaSearch", "{evaluator: {name: RegressionEvaluator, label: y}}", {}, "did you mean 'labelCol'"),
        ("OptunaSearch", "{space: {epochs: {low: 1, high: 2}}}", {}, "a range has one key, uniform"),
        ("TorchClassifier", "{estimator: 3}", {}, "TorchClassifier has no Param 'estimator'"),
        (
            "TorchAutoencoder",
            "{inputCols: [a]}",
            {"evaluation": "{data: {parquet: /rows}}"},
            "evaluation needs labels, but TorchAutoencoder has none; remove evaluation",
        ),
    ],
)
def test_a_mistake_in_a_stage_within_a_stage_is_one_sentence_with_its_line(
    tmp_path, stage, params, more, message
):
    file, job = train_job.read_job(_job(tmp_path, stage, params, **more))
    with pytest.raises(ValueError, match=rf"{stage}.yaml, line [1-6]: .*{message}") as caught:
        train_job.make_estimator(file, job)
    assert str(caught.value).count("\n") == 0
    assert str(caught.value).count(".yaml") == 1
