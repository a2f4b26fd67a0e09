"""Examples of pages that promise a test."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from ringspark.estimators.launch.local import train_here
from ringspark.estimators.stages.to_config import config_of
from ringspark.estimators.training.check.driver import check_training

DOCS = Path(__file__).parent.parent / "docs"


def _run(page: str) -> dict[str, Any]:
    """Runs the page's Python code and returns its names."""
    code = "\n".join(re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), flags=re.DOTALL))
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(code, page, "exec"), names)
    return names


@pytest.mark.spark
@pytest.mark.slow
def test_the_page_about_fine_tuning(spark: Any) -> None:
    names = _run("finetuning.md")
    first, tuned = (names[name].module().state_dict() for name in ("first", "tuned"))
    frozen = [name for name in first if name.startswith(("stem", "blocks.0."))]
    assert all(torch.equal(tuned[name], first[name]) for name in frozen)
    assert not torch.equal(tuned["blocks.1.first.weight"], first["blocks.1.first.weight"])
    scored = names["tuned"].transform(names["table"](7, 9, 900))
    assert scored.where("prediction = label").count() > 0.8 * scored.count()
    reader, merged = (names[name].module() for name in ("reader", "adapted"))
    adapter = names["adapted"].adapter()
    changed = {n for n, t in merged.state_dict().items() if not torch.equal(t, reader.state_dict()[n])}
    layers = {f"blocks.{i}.attention.{layer}" for i in range(2) for layer in ("qkv", "out")}
    assert changed == {f"{layer}.weight" for layer in layers} | {"head.weight", "head.bias"}
    names_of = {f"{layer}.lora_{part}" for layer in layers for part in "AB"}
    assert adapter.keys() == names_of | {"head.weight", "head.bias"}
    for layer in layers:
        product = 2 * adapter[f"{layer}.lora_B"] @ adapter[f"{layer}.lora_A"]
        expected = reader.get_parameter(f"{layer}.weight") + product
        assert torch.allclose(merged.get_parameter(f"{layer}.weight"), expected, atol=1e-6)
    names["adapted"].save(f"{names['folder']}/adapted")
    loaded = type(names["adapted"]).load(f"{names['folder']}/adapted")
    assert loaded.adapter().keys() == adapter.keys()
    with pytest.raises(ValueError, match="holds no adapter; fit with lora="):
        names["tuned"].adapter()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Lightning warns about data loader workers and its next version
def test_lightning_and_we_train_its_module_alike(make_shards: Callable[..., Any], tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")
    names = _run("lightning.md")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(112, 4)).astype(np.float32)
    y = x.sum(1)
    manifest = make_shards({"x": x, "y": y}, num_files=1, row_group_rows=112)
    estimator = names["estimator"].setShuffle(False).setReader("arrow")
    config, objects = config_of(estimator, "regression", ["y"])
    changes = {"shards_uri": manifest.uri, "run_uri": str(tmp_path / "run")}
    config = type(config)(**{**vars(config), **changes})
    config = check_training(config, objects, manifest).config
    ours = load_file(Path(train_here(config, objects).checkpoint_uri) / "model.safetensors")

    module = objects.module
    rows = torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=32))
    for name, tensor in module.state_dict().items():
        assert (ours[name] - tensor).abs().max() < 1e-6, name
        assert not torch.equal(before[name], tensor), name


@pytest.mark.slow
def test_a_lightning_module_without_a_loss_is_refused(make_shards: Callable[..., Any]) -> None:
    pytest.importorskip("lightning")
    estimator = _run("lightning.md")["estimator"]
    estimator.clear(estimator.loss)
    manifest = make_shards({"x": np.ones((8, 4), np.float32), "y": np.ones(8, np.float32)})
    config, objects = config_of(estimator, "regression", ["y"])
    with pytest.raises(ValueError, match=r"model Net is a LightningModule, .* set loss to what"):
        check_training(config, objects, manifest)
