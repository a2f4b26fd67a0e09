"""Clipped gradient sums against a loop over rows, for several kinds of networks."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from small_networks import Net
from small_training import bare_config
from torch import nn

from ringspark.estimators.training.feed import Batch
from ringspark.estimators.training.objective.criterion import Criterion
from ringspark.estimators.training.objective.heads import Head
from ringspark.estimators.training.precision import LossScaler
from ringspark.estimators.training.step import Recipe
from ringspark.extras.privacy.row_gradients import RowGradients
from ringspark.models import ModelSpec
from ringspark.models.lora import add_lora

ROWS, CLIP = 11, 0.7


def recurrent(kind: Any) -> nn.Module:
    layers = {"layer": kind(3, 4, batch_first=True), "last": nn.Linear(4, 1)}
    return Net(lambda self, x: self.last(self.layer(x)[0][:, -1]), **layers)


def tied() -> nn.Module:
    """Uses a parameter twice, once outside its layer, as opacus' hooks cannot follow."""
    compute = lambda self, x: self.last(nn.functional.linear(self.first(x).tanh(), self.first.weight))  # noqa: E731
    return Net(compute, first=nn.Linear(6, 6), last=nn.Linear(6, 1))


class Centered(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y - 0.5 * y.mean(0)


def image_network() -> nn.Module:
    layers = [nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16, 1)]
    return nn.Sequential(*layers)


def text_network() -> nn.Module:
    sizes = {"vocab_size": 9, "max_seq_len": 5, "dim": 8, "depth": 1, "num_heads": 2, "mlp_dim": 16}
    return ModelSpec("transformer_classifier", {**sizes, "out_features": 1}).build()


NETWORKS: dict[str, tuple[Any, Any]] = {
    "layers": (lambda: nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 1)), (6,)),
    "image": (image_network, (1, 6, 6)),
    "text": (text_network, None),
    "lstm": (lambda: recurrent(nn.LSTM), (7, 3)),
    "gru": (lambda: recurrent(nn.GRU), (7, 3)),
    "tied": (tied, (6,)),
    "centered": (lambda: Centered(6, 1), (6,)),
}


def make(network: nn.Module, loss: Any = "mse", **changes: Any) -> RowGradients:
    config, device = bare_config(**changes), torch.device("cpu")
    criterion = Criterion([Head(label="y", loss=loss, width=1)], device)
    recipe = Recipe(config=config, criterion=criterion, scaler=LossScaler("fp32", device), device=device)
    return RowGradients(recipe, network, CLIP, 4)


def batch_of(shape: tuple[int, ...] | None, weight: torch.Tensor | None = None) -> Batch:
    torch.manual_seed(3)
    x = torch.randint(0, 9, (ROWS, 5)) if shape is None else torch.randn(ROWS, *shape)
    return Batch(inputs=(x,), labels=(torch.randn(ROWS),), weight=weight)


def in_a_loop(network: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
    """Returns the sum of the clipped gradients, by the backward pass of each row alone."""
    trained = {name: p for name, p in network.named_parameters() if p.requires_grad}
    sums = {name: torch.zeros_like(p) for name, p in trained.items()}
    for row in range(batch.num_rows):
        network.zero_grad()
        loss = (network(batch.inputs[0][row : row + 1]).squeeze() - batch.labels[0][row]).square()
        (loss if batch.weight is None else loss * batch.weight[row]).backward()
        gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in trained.items()}
        norm = torch.cat([g.flatten() for g in gradients.values()]).norm()
        for name, gradient in gradients.items():
            sums[name] += gradient * (CLIP / norm).clamp(max=1)
    return sums


def sums_of(rows: RowGradients, batch: Batch) -> dict[str, torch.Tensor]:
    sums = rows.zeros()
    rows.add(batch, sums)
    return sums


def equal_to_a_loop(network: Any, batch: Batch, rtol: float = 0.0001, atol: float = 1e-05) -> Any:
    sums, wanted = sums_of(make(network), batch), in_a_loop(network, batch)
    assert sums.keys() == wanted.keys()
    for key, total in sums.items():
        torch.testing.assert_close(total, wanted[key], rtol=rtol, atol=atol)
    return sums


@pytest.mark.parametrize("name", NETWORKS)
def test_clipped_sums_equal_a_loop_over_rows(name: str) -> None:
    make_network, shape = NETWORKS[name]
    torch.manual_seed(2)
    sums = equal_to_a_loop(make_network(), batch_of(shape), rtol=2e-4, atol=2e-5)
    assert any(total.abs().max() > 1e-3 for total in sums.values())


def test_weights_scale_a_row_before_it_is_clipped() -> None:
    equal_to_a_loop(nn.Linear(6, 1), batch_of((6,), torch.linspace(0, 100, ROWS)))


def test_adapters_alone_are_trained() -> None:
    network = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 1))
    add_lora(network, rank=2, alpha=2.0, targets=["0"])
    sums = equal_to_a_loop(network, batch_of((6,)))
    assert set(sums) == {n for n, p in network.named_parameters() if p.requires_grad}


def test_one_row_changes_the_sum_by_at_most_the_bound() -> None:
    network, batch = Centered(6, 1), batch_of((6,))
    huge = torch.full((1, 6), 1e6)
    more = replace(batch, inputs=(torch.cat([batch.inputs[0], huge]),), labels=(torch.zeros(ROWS + 1),))
    rows = make(network)
    both = (replace(batch, labels=(torch.zeros(ROWS),)), more)
    found = [torch.cat([total.flatten() for total in sums_of(rows, each).values()]) for each in both]
    assert float((found[1] - found[0]).norm()) <= CLIP * (1 + 1e-5)


def test_a_row_without_a_finite_gradient_adds_nothing() -> None:
    network, batch = nn.Linear(6, 1), batch_of((6,))
    x = batch.inputs[0].clone()
    x[3], x[7] = float("nan"), 1e38
    rows, kept = make(network), [row for row in range(ROWS) if row not in (3, 7)]
    wanted = sums_of(rows, replace(batch, inputs=(x[kept],), labels=(batch.labels[0][kept],)))
    for key, total in sums_of(rows, replace(batch, inputs=(x,))).items():
        torch.testing.assert_close(total, wanted[key])


def test_dropout_differs_between_rows() -> None:
    network = nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 1))
    batch = Batch(inputs=(torch.ones(8, 6),), labels=(torch.zeros(8),), weight=None)
    gradients = make(network).of_rows(batch)["1.weight"]
    assert len(gradients.unique(dim=0)) > 4


def test_gradients_of_bf16_are_close_to_fp32() -> None:
    network, batch = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1)), batch_of((6,))
    exact, rounded = (make(network, precision=p).of_rows(batch) for p in ("fp32", "bf16"))
    for key, gradient in exact.items():
        assert rounded[key].dtype == torch.float32
        assert 0 < float((rounded[key] - gradient).abs().max()) < 0.1 * float(gradient.abs().max()) + 0.02


def test_passes_have_a_bounded_number_of_rows() -> None:
    sizes: list[int] = []

    rows = make(nn.Linear(6, 1))
    inner = rows.of_rows
    rows.of_rows = lambda batch: sizes.append(batch.num_rows) or inner(batch)  # type: ignore[method-assign]
    sums_of(rows, batch_of((6,)))
    assert sizes == [4, 4, 3]
    assert RowGradients(rows._recipe, nn.Linear(8192, 8192), CLIP, 100).most_rows == 1
