"""Refusals of checkpoints, restarts and resumed runs."""

from typing import Any

from pandas import DataFrame
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.tree import DecisionTreeClassifier
from torch import nn

from bad_input_table.place import BadInput, Place, blocked, cut, unread
from ringspark.estimators import TorchEstimator, TorchRegressor
from ringspark.estimators.run.folder import RunRefusedError
from ringspark.models import ModelSpec

R = BadInput

# fmt: off
RUNS = [
    R("fit: more workers than there are", lambda p: p.fit(minWorkers=2),
      "minWorkers .2. .* numWorkers", "lower"),
    R("fit: fewer at most than at first", lambda p: p.fit(numWorkers=2, maxWorkers=1),
      r"maxWorkers \(1\) must be numWorkers \(2\) or more", "raise maxWorkers"),
    R("fit: growth without checkpoints by time",
      lambda p: p.fit(numWorkers=1, maxWorkers=2, checkpointEverySeconds=0),
      r"maxWorkers \(2\) lets new workers start from a checkpoint", "leave checkpointEverySeconds unset"),
    R("fit: more workers at most than rows of a batch", lambda p: p.fit(batchSize=4, maxWorkers=8),
      r"batchSize .*numWorkers \(8\)", "raise"),
    R("fit: back to no checkpoint", lambda p: p.fit(onNonFinite="rollback", checkpointEverySeconds=0),
      "'rollback' resumes from the last checkpoint, but no checkpoints are", "set checkpointEverySeconds"),
    R("fit: a certificate without a folder", lambda p: p.fit(certify=True),
      "certify=True keeps the rows .* got runUri=None and data='copy'", "set runUri to a new folder"),
    R("fit: a certificate of steps with two attempts", lambda p: p.fit(certify=True, onNonFinite="rollback"),
      "certify needs steps that can be repeated, but onNonFinite", "set onNonFinite='skip'"),
    R("resume: no folder", lambda p: p.fit(resume=True),
      "resume=True continues", "set runUri to that folder"),
    R("resume: not asked for", lambda p: p.train(runUri=p.prepared("run")), "holds a run", "set resume=True"),
    R("resume: no run", lambda p: go_on(p, "shards"), "must be a new or empty folder", "give another folder"),
    R("resume: unwritable folder", lambda p: p.train(runUri=blocked(p)),
      "cannot be written", "choose a folder"),
    R("resume: other settings", lambda p: go_on(p, "run", weightDecay=0.5),
      "cannot be resumed, .* weightDecay: 0.0 -> 0.5", "set them back, or give another folder",
      RunRefusedError),
    R("resume: another rate after the end", lambda p: go_on(p, "run", learningRate=0.5),
      "has finished, and these changed: learningRate: 0.001 -> 0.5", "raise epochs to train further",
      RunRefusedError),
    R("resume: more epochs without a state", lambda p: go_on(p, "run", epochs=2),
      "has finished without keepTrainingState=True", "set initialModel to its model", RunRefusedError),
    R("initialModel: no model", lambda p: p.fit(initialModel=3),
      "fitted model or the path", "give the fitted", TypeError),
    R("teacher: no model", lambda p: p.fit(teacher=3),
      "teacher must be a fitted model or the path", "give the fitted", TypeError),
    R("teacher: neither column nor path", lambda p: p.fit(teacher="nosuch"),
      "teacher is no column, so it is a path: nosuch holds no saved", "give the folder that save.. wrote"),
    R("teacher: an input, too", lambda p: unread(p, teacher="features"),
      "teacher and the inputs both name 'features'", "choose other inputs"),
    R("teacher: a column of texts", lambda p: unread(p, teacher="text"),
      "teacher 'text' is a column of string", "give numbers, arrays of numbers, or vectors"),
    R("teacher: predicts no classes", lambda p: unread(p, teacher=LinearRegression().fit([[0.0]], [0.0])),
      "teacher LinearRegression .*class probabilities", "give a teacher of the same task"),
    R("teacher: predicts no values", lambda p: unread(p, TorchRegressor, teacher=taught([0, 1])),
      "teacher LogisticRegression .*must be a regressor", "give a teacher of the same task"),
    R("teacher: not fitted", lambda p: unread(p, teacher=LogisticRegression()),
      "teacher LogisticRegression is not fitted", "give an estimator that was fitted"),
    R("teacher: several labels",
      lambda p: unread(p, teacher=DecisionTreeClassifier().fit([[0], [1]], [[0, 1], [1, 0]])),
      "teacher DecisionTreeClassifier has several labels", "fitted on one label"),
    R("teacher: classes from 1, of a table",
      lambda p: unread(p, model=ModelSpec("tabpack"), inputCols=["half"], teacher=taught([1, 2])),
      r"teacher has the classes \[1, 2\]", "must be 0 to 1; fit the teacher on such labels"),
    R("teacher: classes as labels",
      lambda p: unread(p, TorchEstimator, loss="bce_with_logits", teacher=taught([0, 1, 2])),
      "teacher LogisticRegression must have two classes", "one probability per label"),
    R("teacher: fitted on another column",
      lambda p: unread(p, teacher=LogisticRegression().fit(DataFrame({"hafl": [0, 1]}), [0, 1])),
      "feature_names_in_ of teacher 'hafl' is not a column", "'half'"),
    R("teacher: fitted on another number of columns",
      lambda p: unread(p, inputCols=["half", "zero"], teacher=taught([0, 1])),
      "was fitted on 1 columns without names", "fit it on a pandas DataFrame"),
    R("initialModel: no such path", lambda p: p.fit(initialModel=p.prepared()),
      "initialModel: .* holds no saved TorchClassificationModel", "give the folder that save.. wrote"),
    R("resume: other batches later on", lambda p: go_on(p, "run", epochs=2, batchSizeSchedule={2: 9}),
      r"cannot be resumed, .* batchSizeSchedule: \[\] -> \[\[2, 9\]\]", "set them back",
      RunRefusedError),
    R("resume: other network", lambda p: go_on(p, "run", model=nn.Linear(2, 1)),
      "cannot be resumed, .* model: ", "set them back", RunRefusedError),
    R("resume: damaged record", lambda p: p.train(runUri=p.prepared("run", cut("run.json")), resume=True),
      "run.json is damaged", "give another folder", RunRefusedError),
    R("resume: one folder for two fits",
      lambda p: p.fit(run=lambda e: e.fit(p.pair, [{e.epochs: 1}, {e.epochs: 2}]), runUri=p.prepared()),
      "is the folder of one training, and 2 parameter maps", "leave runUri unset"),
    R("initialModel: another network",
      lambda p: p.fit(initialModel=p.model, model=ModelSpec("linear", {"in_features": 2, "out_features": 2})),
      r"'linear\.bias' of shape \[1\], but the model's has .*\[2\]", "leave model unset"),
    R("initialModel: other inputs", lambda p: p.fit(initialModel=p.model, inputCols=["half"]),
      r"takes the columns \['features'\], and the estimator has \['half'\]", "give the estimator the same"),
    R("initialModel: another label", lambda p: p.fit(initialModel=p.model, labelCol="zero"),
      "initialModel has labelCol 'label', and the estimator has 'zero'", "set labelCol to the model's"),
    R("initialModel: no training state", lambda p: p.fit(initialModel=p.model, initialState="optimizer"),
      "there is none next to .*;", "fit the initial model with keepTrainingState=True"),
    R("initialModel: two sources of weights", lambda p: p.fit(initialModel=p.model, pretrained=p.storage),
      "both set the initial weights", "leave one of them unset"),
    R("initialModel: features of another length",
      lambda p: p.fit(run=lambda e: e.fit(p.table.selectExpr("array(1D, 2D, 3D) AS features", "label")),
                      initialModel=p.model),
      "column 'features' is .*2.* for initialModel and .*3", "give rows of the same type and shape"),
    R("initialModel: of another task", lambda p: p.fit(TorchRegressor, initialModel=p.model),
      "must be a TorchRegressionModel, got a TorchClassificationModel", "fit with the estimator of the same"),
]
# fmt: on


def taught(classes: list[int]) -> Any:
    """Returns a classifier of one number."""
    return LogisticRegression().fit([[each] for each in classes], classes)


def go_on(place: Place, copy_of: str, **changes: Any) -> Any:
    """Resumes the run in a copy of a folder."""
    settings = {"epochs": 1, "batchSize": 1024, "runUri": place.prepared(copy_of), "resume": True}
    return place.train(**(settings | changes))
