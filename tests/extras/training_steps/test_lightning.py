"""`trainingStep="lightning"` trains a LightningModule as Lightning's own Trainer does."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from small_training import config_of, train_gang
from torch import nn
from torch.nn import functional as F

from ringspark.estimators.launch.local import train_here
from ringspark.estimators.training.check.driver import check_training
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.extras.training_steps.lightning_step import LightningStep, _Trainer
from ringspark.pipelines import ShardManifest

lightning = pytest.importorskip("lightning")

ROWS = 112
BATCH = 32


class Gan(lightning.LightningModule):
    """Manual optimization of two optimizers; the batch is (noise, real rows)."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        self.discriminator = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, noise: torch.Tensor) -> Any:
        return self.generator(noise)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        noise, real = batch
        of_generator, of_discriminator = self.optimizers()
        self.toggle_optimizer(of_discriminator)
        of_discriminator.zero_grad()
        found = self.discriminator(real), self.discriminator(self(noise))
        self.manual_backward(F.softplus(-found[0]).mean() + F.softplus(found[1]).mean())
        self.clip_gradients(of_discriminator, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        of_discriminator.step()
        self.untoggle_optimizer(of_discriminator)
        if batch_idx % 2 == 0 or self.current_epoch > 0:
            # Without toggling, the discriminator gets gradients too, which its zero_grad removes.
            of_generator.zero_grad()
            loss = F.softplus(-self.discriminator(self(noise))).mean()
            self.manual_backward(loss)
            of_generator.step()
            self.log("g_loss", loss, prog_bar=True)

    def configure_optimizers(self) -> Any:
        generator = torch.optim.Adam(self.generator.parameters(), lr=0.01, betas=(0.5, 0.9))
        return [generator, torch.optim.SGD(self.discriminator.parameters(), lr=0.1, momentum=0.9)]


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))

    def forward(self, x: torch.Tensor) -> Any:
        return self.layers(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = F.mse_loss(self(x), y)
        # Lightning's own examples put these words before a name, as the history does.
        for name in ("train_mse", "train_loss", "train/far"):
            self.log(name, loss)
        return {"loss": loss}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        self.log("distance", (self(x) - y).abs().mean())
        for name in ("val_mse", "validation/far", "val_loss"):
            self.log(name, F.mse_loss(self(x), y))
        return F.mse_loss(self(x), y)

    def configure_optimizers(self) -> Any:
        return {"optimizer": torch.optim.Adam(self.parameters(), lr=0.01)}


def data() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=(ROWS, width)).astype(np.float32) for name, width in (("x", 4), ("y", 2))}


def objects_of(kind: Callable[[], nn.Module]) -> UserObjects:
    torch.manual_seed(1)
    return UserObjects(module=kind(), training_step=LightningStep())


def config(manifest: ShardManifest, run: Path, **changes: Any) -> TrainConfig:
    common = {"task": "any", "losses": ("auto",), "training_step": "lightning", "shuffle": False}
    return config_of(manifest, run, **(common | {"batch_size": BATCH} | changes))


def largest_difference(uri: str, expected: dict[str, torch.Tensor]) -> float:
    found = load_file(Path(uri) / "model.safetensors")
    return max(float((found[name] - expected[name]).abs().max()) for name in expected)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.filterwarnings("ignore")  # Lightning warns about data loader workers and its next version
@pytest.mark.parametrize("kind", [Gan, Regression])
def test_lightning_and_we_train_the_same_weights(kind: type[Any], make_shards: Any, tmp_path: Path) -> None:
    columns = data()
    manifest = make_shards(columns, num_files=1, row_group_rows=ROWS)
    module = objects_of(kind).module
    rows = torch.utils.data.TensorDataset(torch.from_numpy(columns["x"]), torch.from_numpy(columns["y"]))
    names = "logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"
    off = dict.fromkeys(names, False)
    trainer = lightning.Trainer(max_epochs=2, accelerator="cpu", default_root_dir=tmp_path, **off)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=BATCH))
    expected = module.state_dict()
    assert all(not torch.equal(before[name], expected[name]) for name in expected)
    one = train_here(config(manifest, tmp_path / "one"), objects_of(kind))
    assert largest_difference(one.checkpoint_uri, expected) < 1e-6
    # The mean over the rows of three ranks, which have different numbers of rows.
    gang = config(manifest, tmp_path / "gang", num_workers=3, collective="torch")
    several = train_gang(gang, objects_of(kind))
    assert largest_difference(several.checkpoint_uri, expected) < 1e-5
    if kind is Gan:
        logged = [record.metrics["train_g_loss"] for record in one.history]
        assert logged == pytest.approx([r.metrics["train_g_loss"] for r in several.history], rel=1e-5)


def test_the_loss_of_held_out_rows_is_what_validation_step_returns(make_shards: Any, tmp_path: Path) -> None:
    columns = data()
    manifest = make_shards(columns, validation=np.arange(ROWS) % 4 == 0)
    objects = objects_of(Regression)
    result = train_here(config(manifest, tmp_path / "run", epochs=1), objects)
    module: Any = objects.module
    module.load_state_dict(load_file(Path(result.checkpoint_uri) / "model.safetensors"))
    x, y = (torch.from_numpy(columns[name][::4]) for name in ("x", "y"))
    with torch.no_grad():
        outputs = module(x)
    (record,) = result.history
    assert record.validation_loss == pytest.approx(float(F.mse_loss(outputs, y)), rel=1e-5)
    names = {"train_mse", "train_far", "validation_distance", "validation_mse", "validation_far"}
    assert record.metrics.keys() == names
    assert record.metrics["validation_distance"] == pytest.approx(float((outputs - y).abs().mean()), rel=1e-5)


class Hooked(Regression):
    def on_train_epoch_end(self) -> None:
        pass


class Scheduled(Regression):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters())
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


class TwoAutomatic(Gan):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = True


class Gathers(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.all_gather(batch[1]).mean()


class Accumulates(Gan):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.discriminator(batch[1]).mean())


class ReturnsNothing(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        return None


@pytest.mark.parametrize(
    ("kind", "held_out", "message"),
    [
        (Hooked, 0, "Hooked has on_train_epoch_end, .* move it into training_step or a Callback"),
        (Scheduled, 0, "configure_optimizers of Scheduled returns a learning-rate schedule; leave it out"),
        (TwoAutomatic, 0, "returns 2 optimizers, .* set automatic_optimization = False"),
        (partial(nn.Linear, 4, 2), 0, "needs a LightningModule, got Linear"),
        (Gan, 9, "Gan has no validation_step, .* add one, or hold out no rows"),
    ],
)
def test_what_the_trainer_would_do_otherwise_is_refused(
    kind: Any, held_out: int, message: str, make_shards: Any, tmp_path: Path
) -> None:
    manifest = make_shards(data(), validation=np.arange(ROWS) < held_out if held_out else None)
    with pytest.raises(ValueError, match=message) as caught:
        check_training(config(manifest, tmp_path / "run"), objects_of(kind), manifest)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Gathers, "all_gather needs equal numbers of rows per rank"),
        (Accumulates, "must call manual_backward and step an optimizer in each batch; raise batchSize"),
        (ReturnsNothing, "training_step must return its loss"),
    ],
)
def test_a_step_that_cannot_be_right_fails(kind: Any, message: str, make_shards: Any, tmp_path: Path) -> None:
    manifest = make_shards(data())
    with pytest.raises(ValueError, match=message):
        train_here(config(manifest, tmp_path / "run"), objects_of(kind))


def test_a_rank_without_rows_may_keep_its_graph() -> None:
    step: Any = SimpleNamespace(optimizers={}, epoch=1, is_training=True, engine=None, num_own=0)
    _Trainer(step).backward(torch.ones(()), retain_graph=True)
