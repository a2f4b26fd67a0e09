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


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("GPT-2", {"parallelism": {"tensor": 2}}),
        ("Llama", {"parallelism": {"sequence": 2}}),
        ("T5", {"parallelism": {"pipeline": 2}, "gradientAccumulation": 2}),
        ("BERT", {}),
    ],
)
def test_a_fit_on_two_workers_equals_one(spark: Any, name: str, settings: dict[str, Any]) -> None:
    _equal(_fit(spark, name, numWorkers=1), _fit(spark, name, numWorkers=2, **settings))


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


def test_adapters_of_a_network_sharded_by_tensor_are_those_of_one_worker(spark: Any, tmp_path: Path) -> None:
    """The driver has only a spec. A module's adapters start from other random numbers."""
    saved = FAMILIES["Llama"].build()
    saved.save_pretrained(tmp_path / "saved")
    options = {"model": FAMILIES["Llama"].spec(), "pretrained": str(tmp_path / "saved"), "lora": ADAPTERS}
    one = _fit(spark, "Llama", numWorkers=1, **options)
    two = _fit(spark, "Llama", numWorkers=2, parallelism={"tensor": 2}, **options)
    assert float((two[TUNED] - saved.state_dict()[TUNED]).abs().max()) > 1e-4
    assert torch.equal(two["lm_head.weight"], saved.state_dict()["lm_head.weight"])
    _equal(one, two)
