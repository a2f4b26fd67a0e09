"""Refusals of columns: their types and values, texts, and windows over time."""

from typing import Any

from pyspark.sql import functions as F
from tokenizers import Tokenizer, processors
from tokenizers import models as tokenizer_models
from torch import nn

from bad_input_table.place import BadInput, Place, unread
from ringspark import pipelines
from ringspark.estimators import TorchRegressor
from ringspark.pipelines import HashBuckets, Image, Padded, Ragged, Tokens, Vocabulary

R = BadInput

IMAGE_STRUCT = "struct<origin:string,height:int,width:int,nChannels:int,mode:int,data:binary>"

# fmt: off
COLUMNS = [
    R("fit: typo in a column", lambda p: p.fit(featuresCol="featurez"),
      "'featurez'", "did you mean 'features'"),
    R("fit: typo in the label", lambda p: p.fit(labelCol="labelz"),
      "labelCol 'labelz'", "did you mean 'label'"),
    R("fit: no weight column", lambda p: p.fit(weightCol="w"),
      "weightCol 'w' is not a column", "the DataFrame has"),
    R("fit: string feature", lambda p: p.fit(inputCols=["text"]), "'text' has type string", "Vocabulary"),
    R("fit: more strings than classes", lambda p: p.fit(labelCol="text"), "classes", "; "),
    R("fit: kind of no column", lambda p: p.fit(columns={"txt": Vocabulary()}),
      "columns 'txt' is not a column", "did you mean 'text'"),
    R("fit: kind of an unused column", lambda p: p.fit(columns={"text": Vocabulary()}),
      "the setting columns names 'text', which is neither an input nor a label", "drop it"),
    R("fit: kind of another type", lambda p: p.fit(columns={"features": Vocabulary()}),
      "'features' has type .* Vocabulary is for strings", "; "),
    R("fit: binary feature", lambda p: p.fit(inputCols=["bytes"]),
      "'bytes' has type binary", "in fit, set columns="),
    R("fit: images in numbers", lambda p: p.fit(columns={"features": Image(4, 4)}),
      "'features' has type array<float>: Image is for bytes", "image struct"),
    R("fit: images in a struct of another type",
      lambda p: p.fit(inputCols=["pair"], columns={"pair": Image(4, 4)}),
      "'pair' has type struct<id:bigint>: Image is for bytes", "image struct"),
    R("fit: an image struct without a size",
      lambda p: p.fit(run=lambda e: e.fit(p.table.withColumn("features", F.lit(None).cast(IMAGE_STRUCT)))),
      "'features' has type struct<origin", r"columns=\{'features': Image\(height, width\)\}"),
    R("fit: an image of no height", lambda p: p.fit(columns={"bytes": Image(0, 4)}),
      "height of Image must be", "from 1 to 16384, got 0"),
    R("fit: nulls", lambda p: p.fit(inputCols=["holey"]),
      "'holey' has nulls in 1 of 60", "handleInvalid='skip'"),
    R("fit: NaN label", lambda p: p.train(labelCol="broken"),
      "'broken' has 1 NaN values", "filter or replace"),
    R("fit: infinite label", lambda p: p.train(TorchRegressor, labelCol="endless"),
      "'endless' has 1 infinite values", "filter or replace"),
    R("fit: label out of range", lambda p: p.train(labelCol="many"),
      r"'many' must lie in 0\.\.1", "StringIndexer"),
    R("fit: label of fractions", lambda p: p.train(labelCol="half"),
      "'half' must hold whole class", "StringIndexer"),
    R("fit: arrays as labels", lambda p: unread(p, labelCol="features"),
      "'features' holds arrays", "one class number per row"),
    R("fit: arrays of any length as labels",
      lambda p: unread(p, TorchRegressor, labelCol="uneven", columns={"uneven": Ragged()}),
      "'uneven' is ragged, but a label or weight must be dense", "give the column arrays of one length"),
    R("fit: filled arrays as labels",
      lambda p: unread(p, TorchRegressor, labelCol="uneven", columns={"uneven": Padded()}),
      "labelCol 'uneven' is Padded, .* its padding for labels", "of one length, or take TorchEstimator"),
    R("fit: hashes as labels",
      lambda p: unread(p, labelCol="text", columns={"text": HashBuckets(8)}),
      "labelCol 'text' is of HashBuckets", r"take columns=\{'text': Vocabulary\(\)\}"),
    R("fit: arrays as weights", lambda p: unread(p, weightCol="features"),
      "weightCol 'features' holds arrays", "one number per row"),
    R("fit: part of a column alone",
      lambda p: unread(p, inputCols=["uneven.values"], columns={"uneven": Ragged()}),
      "'uneven.values' cannot be used alone", "name 'uneven' itself"),
    R("fit: negative weights", lambda p: p.train(weightCol="negative"),
      "weightCol 'negative' must not be", "got -30"),
    R("fit: weights all 0", lambda p: p.train(weightCol="zero"),
      "weightCol 'zero' is 0 in all", "leave the column"),
    R("fit: indicator is an input", lambda p: p.fit(inputCols=["many"], validationIndicatorCol="many"),
      "validationIndicatorCol 'many' must not also be an input", "copy it"),
    R("fit: best of no held-out rows", lambda p: p.fit(validationIndicatorCol="never", keep="best"),
      "validationIndicatorCol holds out none of the 60 rows", "hold out more"),
    R("fit: two ways to hold out", lambda p: p.fit(validationIndicatorCol="never", validationFraction=0.1),
      "validationFraction or validationIndicatorCol", "not both"),
    R("fit: half a split", lambda p: p.fit(validationFraction=1.5),
      "validationFraction must lie", "between 0 and 1"),
    R("fit: output column there", lambda p: p.fit(predictionCol="half"),
      "column half already exists", "drop it"),
    R("fit: one column for two", lambda p: p.fit(predictionCol="probability"),
      "output columns must differ", "got"),
    R("contributions: a network of the user", lambda p: unread(p, contributionsCol="why"),
      "contributionsCol is for predictions from the columns of a table", "without a model"),
    R("inner columns: a list", lambda p: p.fit(innerCols=["linear"]),
      "innerCols must map names of modules", "", TypeError),
    R("inner columns: no module", lambda p: unread(p, innerCols={"linera": "code"}),
      "innerCols names 'linera', which is no module of Linear", "did you mean 'linear'"),
    R("inner columns: the name of an output", lambda p: unread(p, innerCols={"linear": "prediction"}),
      "output columns must differ", "got"),
    R("inner columns: a column of the table", lambda p: unread(p, innerCols={"linear": "half"}),
      "column half already exists", "drop it"),
    R("fit: names in two cases",
      lambda p: p.fit(run=lambda e: e.fit(p.pair.select("features", "label", F.lit(1.0).alias("Label")))),
      r"column 'label' is ambiguous, the DataFrame has \['label', 'Label'\]", "rename one of them"),
    R("fit: numbers beyond float32",
      lambda p: p.fit(run=lambda e: e.fit(p.table.selectExpr("array(many * -1e39D) as features", "label")),
                      model=nn.Linear(1, 1)),
      r"'features' holds values up to 5\.9e\+40 in the train rows", "float32"),
    R("fit: a column named like a null mask",
      lambda p: p.fit(run=lambda e: e.fit(p.table.withColumn("half.isnull", F.lit(0))), featuresCol="half",
                      weightCol="half.isnull"),
      "'half.isnull' has the name of the null mask .* for 'half'", "rename it"),
    R("fit: a kind in two cases",
      lambda p: p.fit(columns={"Text": Vocabulary(), "text": Vocabulary()}, featuresCol="text"),
      "columns names 'text' twice", "keep only one"),
    R("fit: kind that is a name", lambda p: p.fit(columns={"text": "hash"}),
      r"columns\['text'\] must be a column type", "got 'hash'", TypeError),
    R("fit: list of kinds", lambda p: p.fit(columns=["text"]),
      "columns must map names to column types", "e.g.", TypeError),
    R("fit: an embedding that is too small",
      lambda p: p.fit(inputCols=["text"], columns={"text": Vocabulary()}, model=nn.Embedding(4, 1)),
      r"cannot take the input columns \[text .*index out of range", "match the model"),
    R("fit: an embedding without the padding",  # the padding of short rows is an id as well
      lambda p: p.fit(run=lambda e: e.fit(p.table.selectExpr("array(3) AS features", "label")),
                      columns={"features": Padded(length=2, value=4)},
                      model=nn.Sequential(nn.Embedding(4, 1), nn.Flatten(), nn.Linear(2, 1))),
      r"cannot take the input columns \[features .*index out of range", "match the model"),
]
# fmt: on

# fmt: off
TEXTS = [
    R("text: no tokenizer there", lambda p: Tokens.of(p.prepared()),
      "there is no .*/tokenizer.json", "pass the folder"),
    R("text: a damaged tokenizer", lambda p: p.write("text", columns={"text": Tokens('{"model": ', 8)}),
      "tokenizer of Tokens cannot be read", "save it again"),
    R("text: no bound", lambda p: words_of(p), "has no maximum length", "set one, e.g."),
    R("text: a number", lambda p: words_of(p, column="many", max_length=8),
      "'many' has type bigint: Tokens is for strings", "; "),
    R("text: too long", lambda p: words_of(p, max_length=4, too_long="cut it"),
      "too_long of Tokens must be 'cut' or 'refuse'", "got 'cut it'"),
    R("text: shorter than the special tokens", lambda p: words_of(p, max_length=2),
      "max_length of Tokens for column 'text' is 2, but the tokenizer adds 2", "set at least 3"),
    R("text: nothing to learn from",
      lambda p: pipelines.train_tokenizer(p.table.where("text is null"), "text"),
      "'text' holds no text", "filter"),
]
# fmt: on


def words_of(place: Place, **settings: Any) -> Any:
    """Fits on the column `text` with a tokenizer of words that adds two tokens to each text."""
    words = {"?": 0, "<": 1, ">": 2}
    made = Tokenizer(tokenizer_models.WordLevel(words, unk_token="?"))
    made.post_processor = processors.BertProcessing((">", 2), ("<", 1))
    column = settings.pop("column", "text")
    return place.fit(featuresCol=column, columns={column: Tokens.of(made, **settings)})


# fmt: off
WINDOWS = [
    R("windows: null key", lambda p: fit_windows(p, keyCols="holey"),
      "'holey' is null at holey=null, many=7", "fill or drop it first, or .* handleInvalid='skip'"),
    R("windows: two rows of one time", lambda p: fit_windows(p, timeCol="zero_whole"),
      "two rows have never=false, zero_whole=0", "merge them first"),
    R("windows: null value", lambda p: fit_windows(p, valueCols="holey"),
      "'holey' is null at never=false, many=7", "fill or drop it first"),
    R("windows: no rows", lambda p: fit_windows(p, steps=0), "steps must be", "at least 1, got 0"),
    R("windows: no such key", lambda p: fit_windows(p, keyCols="nevr"),
      "keyCols 'nevr' is not a column", "did you mean 'never'"),
    R("windows: time in words", lambda p: fit_windows(p, timeCol="text"),
      "timeCol 'text' has type string", "make it a timestamp"),
    R("windows: over a stream",
      lambda p: windows(keyCols=[], timeCol="value", valueCols="value", steps=2).transform(
          p.spark.readStream.format("rate").load()),
      "takes no stream", "foreachBatch"),
]
# fmt: on


def windows(**params: Any) -> Any:
    # Imported here, because `ringspark.extras` may be missing.
    from ringspark.estimators import SequenceWindows

    return SequenceWindows(**params)


def fit_windows(place: Place, **changes: Any) -> Any:
    """Fits on windows over the table's rows, with some Params changed."""
    params = {"keyCols": "never", "timeCol": "many", "valueCols": "half", "steps": 2} | changes
    table = place.table.drop("features").withColumn("zero_whole", F.col("zero").cast("int"))
    return place.fit(run=lambda estimator: estimator.fit(windows(**params).transform(table)))
