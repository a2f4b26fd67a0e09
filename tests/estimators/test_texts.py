"""Text columns: `fit` and `transform` tokenize them and pad each batch to its longest text."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pyspark.ml import Pipeline, PipelineModel
from spark_tables import quiet, run_stream, values_of
from tokenizers import Tokenizer, models, pre_tokenizers

from ringspark.estimators import TorchClassifier
from ringspark.models import ModelSpec
from ringspark.pipelines import Tokens

pytestmark = pytest.mark.spark

WORDS = ["[PAD]", "?", "snow", "ice", "sun", "sand", "and", "much"]
# The last text has unknown words only, and the one before has no tokens.
TEXTS = ["snow and ice", "sun", "much sand and much sun", "ice", "much much snow", "", "rain"]
CLASSES = ["cold", "warm", "warm", "cold", "cold", "warm", "warm"]
SIZES = {"vocab_size": len(WORDS), "dim": 8, "out_features": 2}
BAG = ModelSpec("embedding_mean", SIZES)
TRANSFORMER = ModelSpec("transformer_classifier", SIZES | {"max_seq_len": 4, "depth": 1, "num_heads": 2})


def tokenizer() -> Tokenizer:
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return made


@pytest.fixture(scope="module")
def table(spark):
    """71 rows: the last step of batches of 10 has one row, and the second worker has none."""
    rows = [(i, TEXTS[i % 7], CLASSES[i % 7]) for i in range(71)]
    return spark.createDataFrame(rows, "id long, text string, weather string").repartition(2)


def classifier(folder: Path, **params: Any) -> TorchClassifier:
    columns = {"text": Tokens.of(tokenizer(), max_length=4)}
    names = {"featuresCol": "text", "labelCol": "weather", "columns": columns}
    settings = {"model": BAG, "epochs": 15, "batchSize": 10, "learningRate": 0.1}
    return quiet(TorchClassifier, folder, **(names | settings | params))


def by_hand(model: Any, texts: list[str]) -> list[str]:
    """Classifies texts one by one, unpadded, truncated to four words."""
    found = []
    for text in texts:
        ids = torch.tensor([[WORDS.index(w) if w in WORDS else 1 for w in text.split()[:4]] or [0]])
        mask = torch.full(ids.shape, float(bool(text)))
        with torch.no_grad():
            found.append(model.labels[int(model.module()(ids, mask).argmax())])
    return found


@pytest.mark.slow
@pytest.mark.modes
def test_texts_are_features_saved_loaded_and_streamed(spark, table, tmp_path):
    fitted = Pipeline(stages=[classifier(tmp_path)]).fit(table)
    fitted.save(str(tmp_path / "model"))
    assert not list((tmp_path / "model").rglob("*.pkl"))
    loaded = PipelineModel.load(str(tmp_path / "model"))
    # Ids and mask share one object, so each text is tokenized once.
    assert len({id(item.column) for item in loaded.stages[0]._inputs}) == 1
    # Texts longer than the training's, an empty text and unknown words, in batches of new lengths.
    texts = [*TEXTS, "sun and sand and snow and ice and ice", "hail", ""]
    new = spark.createDataFrame([(i, text) for i, text in enumerate(texts)], "id long, text string")
    new.coalesce(1).write.parquet(str(tmp_path / "new"))
    wanted = by_hand(fitted.stages[0], texts)
    assert wanted[:7] == CLASSES
    for model in (fitted, loaded):
        assert values_of(model.transform(new), "predictedLabel") == wanted
    stream = loaded.transform(spark.readStream.schema("id long, text string").parquet(str(tmp_path / "new")))
    assert values_of(run_stream(stream, tmp_path), "predictedLabel") == wanted


@pytest.mark.slow
def test_two_workers_are_one_though_each_pads_to_its_own_longest(table, tmp_path):
    """This includes a worker without rows, and micro-batches."""
    weights = []
    for workers, accumulation in ((1, 1), (2, 1), (1, 3)):
        spread = {"numWorkers": workers, "gradientAccumulation": accumulation}
        model = classifier(tmp_path, model=TRANSFORMER, optimizer="sgd", epochs=2, **spread).fit(table)
        weights.append(model.module().state_dict())
    one, two, cut = weights
    assert all((one[name] - two[name]).abs().max() < 1e-6 for name in one)
    assert all((one[name] - cut[name]).abs().max() < 1e-6 for name in one)


@pytest.mark.slow
def test_a_recurrent_network_in_chunks_of_time_fits_and_is_saved_whole(table, tmp_path):
    """Two pipeline stages train on texts of one to four tokens; the model predicts each row alone."""
    spec = ModelSpec("recurrent", SIZES | {"hidden": 8, "depth": 2})
    settings: dict[str, Any] = {"numWorkers": 2, "collective": "torch"}
    settings["parallelism"] = {"pipeline": {"stages": 2, "sequence_chunks": 3, "cuts": ["layers.1"]}}
    model = classifier(tmp_path / "runs", model=spec, epochs=8, **settings).fit(table)
    model.write().save(str(tmp_path / "model"))
    again = type(model).load(str(tmp_path / "model"))
    said = {row.text: row.predictedLabel for row in again.transform(table).collect()}
    assert said == dict(zip(TEXTS, by_hand(model, TEXTS), strict=True))
    assert [said[text] for text in TEXTS] == CLASSES


@pytest.mark.extras
def test_a_text_that_is_too_long_is_refused_where_that_is_asked_for(table, tmp_path):
    short = Tokens.of(tokenizer(), max_length=4, too_long="refuse")
    with pytest.raises(ValueError, match="column 'text' holds a text of 5 tokens, but max_length=4 is"):
        classifier(tmp_path, columns={"text": short}).fit(table)
    fitting = table.where("length(text) < 20")
    model = classifier(tmp_path, columns={"text": short}, epochs=1).fit(fitting)
    with pytest.raises(Exception, match="column 'text' holds a text of 5 tokens, but max_length=4 is"):
        model.transform(table).collect()
    assert not list(tmp_path.glob("shards-*"))
