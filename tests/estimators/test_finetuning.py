"""Fine-tuning from a saved model's weights, with settings that are saved with the stage."""

import pytest
import torch
from safetensors.torch import save_file
from spark_tables import quiet
from torch import nn

from ringspark.estimators import TorchClassifier
from ringspark.models import ModelSpec

pytestmark = pytest.mark.spark


def _spec(classes: int) -> ModelSpec:
    return ModelSpec("mlp", {"in_features": 2, "hidden": [6, 6], "out_features": classes})


@pytest.fixture
def table(spark):
    return spark.range(0, 60, 1, 2).selectExpr("array(sin(id), cos(id)) as features", "id % 2 as label")


def test_a_stage_that_was_saved_tunes_a_checkpoint(table, tmp_path):
    before = _spec(4).build().state_dict()
    save_file(before, tmp_path / "first.safetensors")
    pretrained = {"uri": str(tmp_path / "first.safetensors"), "ignore": "head.*"}
    tuning = {"lora": {"rank": 2, "targets": "trunk.1.*", "train": "head.*"}, "emaDecay": 0.3}
    params = {"model": _spec(2), "pretrained": pretrained, "batchSize": 20} | tuning
    stage = quiet(TorchClassifier, tmp_path, **params)
    stage.save(str(tmp_path / "stage"))
    model = TorchClassifier.load(str(tmp_path / "stage")).fit(table)
    after = model.module().state_dict()
    changed = {name for name in after if not torch.equal(before[name], after[name])}
    assert changed == {"trunk.1.linear.weight", "head.weight", "head.bias"}
    model.save(str(tmp_path / "tuned"))
    adapter = type(model).load(str(tmp_path / "tuned")).adapter()
    layer = "trunk.1.linear"
    assert adapter.keys() == {f"{layer}.lora_A", f"{layer}.lora_B", "head.weight", "head.bias"}
    product = adapter[f"{layer}.lora_B"] @ adapter[f"{layer}.lora_A"]
    assert torch.allclose(after[f"{layer}.weight"], before[f"{layer}.weight"] + product, atol=1e-6)


def test_a_module_of_one_s_own_is_frozen_in_the_training_alone(table, tmp_path):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(2, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    stage = quiet(TorchClassifier, tmp_path, model=module, freeze=["0.*", "1.*"], batchSize=20)
    found = stage.fit(table).module()
    assert all(p.requires_grad for p in (*module.parameters(), *found.parameters()))
    for name, tensor in module.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor) == (not name.startswith("2.")), name
