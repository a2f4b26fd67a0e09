"""Networks of transformers in Spark fits: two workers along an axis give one worker's weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hugging_face_families import FAMILIES

from ringspark.estimators import TorchEstimator
from ringspark.estimators.options.finetuning import LoRA

pytest.importorskip("transformers")
pytestmark = [pytest.mark.spark, pytest.mark.slow]
ADAPTERS = LoRA(rank=4, targets=["*.q_proj", "*.v_proj"])
TUNED = "model.layers.0.self_attn.v_proj.weight"


def _fit(spark: Any, name: str, **settings: Any) -> dict[str, torch.Tensor]:
    family = FAMILIES[name]
    columns = family.columns(48)
    rows = [tuple(columns[key][row].tolist() for key in (*family.inputs, "y")) for row in range(48)]
    frame = spark.createDataFrame(rows, [*family.inputs, "y"]).repartition(2)
    names = {"inputCols": list(family.inputs), "labelCol": "y"}
    names["loss"] = family.losses[0] if family.losses else "cross_entropy"
    sizes = {"optimizer": "momentum", "learningRate": 0.05, "batchSize": 16, "epochs": 1, "shuffle": False}
    settings = {"model": family.build(), "collective": "torch", **names, **sizes, **settings}
    return TorchEstimator(**settings).fit(frame.cache()).module().state_dict()


def _equal(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> None:
    torch.testing.assert_close(one, two, rtol=0, atol=1e-5)


def test_a_saved_folder_is_tuned_by_adapters_on_two_workers_like_on_one(spark: Any, tmp_path: Path) -> None:
    changed = FAMILIES["Llama"].build()
    with torch.no_grad():
        changed.model.norm.weight.mul_(1.5)
    changed.save_pretrained(tmp_path / "saved")
    options = {"pretrained": str(tmp_path / "saved"), "lora": ADAPTERS}
    one = _fit(spark, "Llama", numWorkers=1, **options)
    before = changed.state_dict()
    assert torch.equal(one["model.norm.weight"], before["model.norm.weight"])
    assert not torch.equal(one[TUNED], before[TUNED])
    _equal(one, _fit(spark, "Llama", numWorkers=2, **options))
