"""Refusals when models are used, exported, saved or loaded."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyspark.sql import functions as F
from torch import nn

from bad_input_table.place import SPEC, BadInput, Place, blocked, cut, edited, gone
from ringspark.estimators import TorchClassifier, TorchModel
from ringspark.estimators.training.checkpoint.weights import save_checkpoint
from ringspark.models import ModelSpec
from ringspark.pipelines.columns import Column
from ringspark.pipelines.kinds import Array

R = BadInput

ON_GPU = {"inferencePrecision": "int8", "inferenceUseGpu": True}
FROM_DISK = {"inferencePrecision": "int8", "inferenceOffload": "disk"}

# fmt: off
MODELS = [
    R("transform: no weights", lambda p: TorchModel(model=SPEC).transform(p.pair),
      "has no weights", "get one from"),
    R("transform: column missing", lambda p: p.model.transform(p.table.drop("features")),
      "'features' is not", ";"),
    R("transform: string column",
      lambda p: p.model.transform(p.table.select(F.col("text").alias("features"))),
      "'features' has type string", "Vocabulary"),
    R("transform: no rows at once", lambda p: p.model.copy().setInferenceBatchSize(0).transform(p.pair),
      "inferenceBatchSize", "at least 1, got 0"),
    R("transform: three thresholds",
      lambda p: p.model.copy().setThresholds([0.1, 0.2, 0.3]).transform(p.pair),
      "thresholds must hold", "each of the 2 classes, got 3"),
    R("contributions: a model of no table",
      lambda p: p.model.copy().setContributionsCol("why").transform(p.pair),
      "contributionsCol is for predictions from the columns of a table", "without a model"),
    R("contributions: drift of no table", lambda p: p.model.compare_inputs(p.pair),
      "compare_inputs is for predictions from the columns of a table", "without a model"),
    R("export: unknown format", lambda p: p.model.export(f"{p.storage}/x", "tf"),
      "format must be", "'onnx'.* got 'tf'"),
    R("save: over something else", lambda p: p.model.write().overwrite().save(p.prepared("shards")),
      "holds something else than a saved stage", "give an empty folder"),
    R("save: unwritable folder", lambda p: p.model.save(blocked(p)), "cannot be written", "choose a folder"),
    R("load: no model", lambda p: TorchModel.load(p.prepared()),
      "holds no saved TorchModel", "give the folder that"),
    R("load: other stage", lambda p: p.load(lambda f: None, TorchModel),
      "not a TorchModel", "load it with that class"),
    R("load: description cut", lambda p: p.load(cut("ringspark.json")), "is damaged", "save the stage again"),
    R("load: weights missing", lambda p: p.load(gone("weights/model.safetensors")),
      "model.safetensors", "; "),
    R("load: weights cut", lambda p: p.load(cut("weights/model.safetensors")),
      "has .* bytes, .* were written", "save the model"),
    R("load: record missing", lambda p: p.load(gone("weights/checkpoint.json")), "holds no checkpoint", "; "),
    R("load: weights of another network", lambda p: p.load(edited("ringspark.json", other_network)).module(),
      "is not of this model", "use the model that was saved"),
    R("load: code without leave", lambda p: TorchClassifier.load(saved_with_code(p)),
      "holds pickled Python code", "RINGSPARK_ALLOW_PICKLE=1"),
    R("load: first weights missing",
      lambda p: TorchClassifier.load(saved_estimator(p, gone("model.safetensors"))),
      "network of 'model' cannot be loaded: model.safetensors is missing", "save the stage again"),
    R("load: program missing", lambda p: TorchModel.load(saved_program(p, gone("model.program.json"))),
      "network of 'model' cannot be loaded: model.program.json .* is missing", "save the stage again"),
    R("load: program with a function of Python",
      lambda p: TorchModel.load(saved_program(p, edited("model.program.json", with_system_call))),
      "uses 'os.system', which is not an allowed operator", "save the stage again"),
    R("load: layer of another torch",
      lambda p: TorchClassifier.load(saved_estimator(p, edited("ringspark.json", with_other_layer))),
      "torch .* has no layer 'Linear9'", "use the torch version that saved it"),
    R("fit: a saved program", lambda p: p.train(model=program_of(p)),
      "model is a saved program, which predicts and cannot be trained", "give a network of its class"),
    R("load: format before the first release",
      lambda p: p.load(edited("ringspark.json", lambda d: d | {"format_version": 1})),
      "its format is 1, from before the first release", "; "),
    R("load: description of no stage", lambda p: p.load(edited("ringspark.json", lambda d: [1])),
      "is damaged", "save the stage again"),
    R("load: description without an entry",
      lambda p: p.load(edited("ringspark.json", lambda d: {"format_version": 2})),
      "is damaged", "save the stage again"),
    R("load: description missing", lambda p: p.load(gone("ringspark.json")),
      "holds no saved TorchClassificationModel", "give the folder that"),
    R("load: metadata missing",
      lambda p: p.load(lambda folder: (folder / "metadata").rename(folder / "elsewhere")),
      "is incomplete .metadata/ is missing", "save the stage again"),
    R("load: record of no checkpoint", lambda p: p.load(edited("weights/checkpoint.json", lambda d: {})),
      "checkpoint.json is damaged", "use another checkpoint"),
    R("transform: a negative threshold",
      lambda p: p.model.copy().setThresholds([0.5, -0.1]).transform(p.pair),
      "thresholds must not be negative", "at most one may be 0"),
    R("transform: two thresholds of 0", lambda p: p.model.copy().setThresholds([0.0, 0.0]).transform(p.pair),
      "thresholds must not be negative", "at most one may be 0"),
    R("evaluate: no metrics", lambda p: p.model.evaluate(p.pair),
      "evaluate needs metrics", "fit with metrics"),
    R("evaluate: no such label", lambda p: measure(p, labelCol="nope"),
      "labelCol 'nope' is not a column", "the DataFrame has"),
    R("evaluate: label out of range", lambda p: measure(p, labelCol="negative"),
      r"'negative' must hold whole class numbers in 0\.\.1", "got -30"),
    R("evaluate: null label", lambda p: measure(p, labelCol="holes"),
      "labelCol 'holes' has a null or NaN", "fill or drop such rows"),
    R("evaluate: metric of values", lambda p: measure(p, metrics=["rmse"]),
      "metrics of a classification must be among", "got 'rmse'"),
    R("export: onto a folder", lambda p: p.model.export(p.prepared()),
      "given is a folder", "give a new path"),
    R("export: to a new folder", lambda p: p.model.export(f"{p.storage}/new/"),
      "new/ is a folder", "give a new path"),
    R("export: onto a file",
      lambda p: p.model.export(f"{p.prepared(damage=lambda f: (f / 'mine').touch())}/mine"),
      "mine exists already", "give a new path"),
    *(
        R(f"save: over a stage with {name}",
          lambda p, name=name: p.model.write().overwrite().save(
              p.prepared("saved", lambda folder: (folder / name).write_text("mine"))),
          f"holds '{name}', which ringspark did not write there", "move that file elsewhere")
        for name in ("metrics.json", "thesis.pkl", "weights/thesis.bin", "metadata/notes.md")
    ),
    R("fit: int8 on a GPU", lambda p: p.fit(**ON_GPU), "int8' runs on the CPU", "set 'bf16'"),
    R("fit: int8 from the disk", lambda p: p.fit(**FROM_DISK),
      "int8' keeps quantized weights in memory", "set inferencePrecision='bf16'"),
    R("transform: int8 on a GPU", lambda p: changed(p, **ON_GPU).transform(p.pair),
      "int8' runs on the CPU", "set 'bf16'"),
    R("transform: int8 from the disk", lambda p: changed(p, **FROM_DISK).transform(p.pair),
      "int8' keeps quantized weights in memory", "set inferencePrecision='bf16'"),
]
# fmt: on


def changed(place: Place, **params: Any) -> Any:
    return place.model.copy().setParams(**params)


def measure(place: Place, **params: Any) -> Any:
    """Evaluates the accuracy on a table that has a column with a null, too."""
    rows = place.table.withColumn("holes", F.expr("if(many = 7, null, label)"))
    return changed(place, **{"metrics": ["accuracy"]} | params).evaluate(rows)


def other_network(description: dict[str, Any]) -> dict[str, Any]:
    spec = ModelSpec("linear", {"in_features": 3, "out_features": 1})
    return description | {"model": spec.to_json()}


class Line(nn.Linear):
    """A network of a user's class."""


def saved_with_code(place: Place) -> str:
    return place.prepared(damage=lambda f: TorchClassifier(model=Line(2, 1)).save(str(f)))


def saved_estimator(place: Place, damage: Callable[[Path], None]) -> str:
    """Saves an estimator with a network in JSON, and damages it."""

    def save(folder: Path) -> None:
        TorchClassifier(model=nn.Linear(2, 1)).save(str(folder))
        damage(folder)

    return place.prepared(damage=save)


def saved_program(place: Place, damage: Callable[[Path], None] = lambda folder: None) -> str:
    """Saves a model with a program as its network, and damages it."""

    def save(folder: Path) -> None:
        module = Line(2, 1)
        save_checkpoint(str(place.root / "weights"), module)
        columns = [Column(name="features", kind=Array("float32", shape=(2,)))]
        model = TorchModel(model=module)
        model._set_trained(str(place.root / "weights"), [(1,)], None, columns=columns).save(str(folder))
        damage(folder)

    return place.prepared(damage=save)


def program_of(place: Place) -> nn.Module:
    return TorchModel.load(saved_program(place)).module()


def with_system_call(text: dict[str, Any]) -> dict[str, Any]:
    return text | {"steps": [["os.system", ["true"], {}]]}


def with_other_layer(description: dict[str, Any]) -> dict[str, Any]:
    description["modules"]["model"]["layers"]["layer"] = "Linear9"
    return description
