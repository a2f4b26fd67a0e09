"""Per-row losses equal torch's mean, also if rows have different weights."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from ringspark.estimators.training.make_heads import find_ignored_label
from ringspark.estimators.training.objective.criterion import Criterion, row_weights
from ringspark.estimators.training.objective.deviance import find_power
from ringspark.estimators.training.objective.heads import Head
from ringspark.estimators.training.objective.losses import (
    LOSSES,
    NOT_OF_OUTPUT_AND_LABEL,
    ClassLoss,
    RowLoss,
    loss_names,
    resolve_loss,
)

ROWS = 7
PLAIN = {"mse": nn.MSELoss, "l1": nn.L1Loss, "huber": nn.HuberLoss, "bce_with_logits": nn.BCEWithLogitsLoss}


def _generator(name: str) -> torch.Generator:
    return torch.Generator().manual_seed(sum(map(ord, name)))


def _cases(name: str) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, nn.Module]]:
    """Returns (output, our label, torch's label, torch's loss) for a loss name."""
    g = _generator(name)
    numbers, tokens = torch.randint(0, 4, (ROWS,), generator=g), torch.randint(0, 4, (ROWS, 5), generator=g)
    tokens[1, 2:] = tokens[4] = -100
    logits, per_token = torch.randn(ROWS, 4, generator=g), torch.randn(ROWS, 4, 5, generator=g)
    if name in ("cross_entropy", "cross_entropy_per_member", "CrossEntropyLoss", "NLLLoss"):
        loss: nn.Module = nn.NLLLoss() if name == "NLLLoss" else nn.CrossEntropyLoss()
        # Spark's labels are doubles, perhaps in an array of length one.
        ours = numbers.double(), numbers[:, None].double()
        classes = [(logits.log_softmax(1), label, numbers, loss) for label in (numbers, *ours)]
        return classes if "member" in name else [*classes, (per_token.log_softmax(1), tokens, tokens, loss)]
    if name == "pinball_per_member":
        output, label = torch.randn(ROWS, 1, generator=g), torch.rand(ROWS, 1, generator=g)
        half: Any = lambda *pair: nn.L1Loss()(*pair) / 2  # noqa: E731
        return [(output, ours, label, half) for ours in (label.double(), label[:, 0].double())]
    if name == "MultiMarginLoss":
        return [(logits, numbers.double(), numbers, nn.MultiMarginLoss())]
    if name == "MultiLabelMarginLoss":
        sets = torch.tensor([[3, 0, -1, 1]] * ROWS)
        return [(logits, sets.double(), sets, nn.MultiLabelMarginLoss())]
    loss = (PLAIN.get(name.removesuffix("_per_member")) or getattr(nn, name))()
    shapes: list[tuple[int, ...]] = [(ROWS, 1), (ROWS, 3)]
    if name != "MultiLabelSoftMarginLoss":
        shapes += [(ROWS,)] if "member" in name else [(ROWS,), (ROWS, 2, 3)]
    cases = []
    for shape in shapes:
        output = torch.rand(shape, generator=g) if name == "BCELoss" else torch.randn(shape, generator=g) * 2
        label = torch.rand(shape, generator=g)
        if name in ("HingeEmbeddingLoss", "SoftMarginLoss"):
            label = label.round() * 2 - 1
        cases.append((output, label.double(), label, loss))
        if shape == (ROWS, 1):
            cases.append((output, label[:, 0].double(), label, loss))
    return cases


def _mean(name: str | nn.Module, output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """Computes the loss like the trainer: sums over rows, then one division."""
    loss = resolve_loss(name)
    rows = loss(output, label)
    assert rows.shape == (ROWS,)
    weigh = row_weights(loss, find_ignored_label(loss))
    return rows.sum() / (weigh(label).sum() if weigh is not None else ROWS)


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides the total loss:UserWarning")
@pytest.mark.parametrize("name", [name for name in loss_names() if find_power(name) is None])
def test_every_loss_by_name_is_torchs_mean(name: str) -> None:
    for output, label, torch_label, reference in _cases(name):
        torch.testing.assert_close(_mean(name, output, label), reference(output, torch_label))


def test_every_loss_of_torch_is_offered_or_refused_with_a_reason() -> None:
    classes = [n for n, v in vars(nn).items() if isinstance(v, type) and issubclass(v, nn.modules.loss._Loss)]
    assert set(classes) - {"NLLLoss2d"} <= {*loss_names(), *NOT_OF_OUTPUT_AND_LABEL}
    assert len(loss_names()) == len(set(loss_names())) > len(LOSSES) + 10


W4 = torch.tensor([0.5, 2.0, 0.0, 3.0])


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(weight=W4),
        nn.CrossEntropyLoss(weight=W4, label_smoothing=0.1),
        nn.CrossEntropyLoss(weight=W4, ignore_index=1),
        nn.CrossEntropyLoss(ignore_index=3, label_smoothing=0.2),
        nn.CrossEntropyLoss(weight=W4, ignore_index=-100),
        nn.NLLLoss(weight=W4, ignore_index=-100),
        nn.NLLLoss(ignore_index=0),
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", [(ROWS,), (ROWS, 5), (ROWS, 2, 3)])
def test_class_weights_and_ignored_places_count_as_torchs(loss: nn.Module, shape: tuple[int, ...]) -> None:
    g = _generator(str(loss))
    output = torch.randn((ROWS, 4, *shape[1:]), generator=g).log_softmax(1)
    label = torch.randint(0, 4, shape, generator=g)
    if loss.ignore_index == -100:
        label.view(ROWS, -1)[2] = -100
    torch.testing.assert_close(_mean(loss, output, label), loss(output, label))


@pytest.mark.parametrize(
    ("loss", "label"),
    [
        # Probabilities as labels count rows, and class weights of a margin loss do not enter the divisor.
        (nn.CrossEntropyLoss(weight=W4), torch.rand(ROWS, 4).softmax(1)),
        (nn.MultiMarginLoss(weight=W4), torch.arange(ROWS) % 4),
    ],
)
def test_a_weighted_loss_that_divides_by_rows_does_so(loss: nn.Module, label: torch.Tensor) -> None:
    output = torch.randn(ROWS, 4, generator=_generator("divisor"))
    ours = label.double() if label.is_floating_point() else label
    torch.testing.assert_close(_mean(loss, output, ours), loss(output, label))


@pytest.mark.parametrize(
    ("loss", "shape"),
    [
        (nn.BCEWithLogitsLoss(pos_weight=torch.tensor([4.0])), (ROWS,)),
        (nn.BCEWithLogitsLoss(pos_weight=torch.tensor([4.0])), (ROWS, 1)),
        (nn.BCEWithLogitsLoss(pos_weight=torch.tensor([4.0, 1.0, 2.0]), weight=torch.ones(3) / 3), (ROWS, 3)),
        (nn.BCELoss(weight=torch.tensor([0.0, 1.0, 2.0])), (ROWS, 3)),
        (nn.MultiLabelSoftMarginLoss(weight=torch.tensor([0.0, 1.0, 2.0])), (ROWS, 3)),
        (nn.HuberLoss(delta=0.1), (ROWS, 3)),
        (nn.KLDivLoss(reduction="batchmean"), (ROWS, 3)),
        (nn.PoissonNLLLoss(log_input=False, full=True), (ROWS,)),
    ],
    ids=str,
)
def test_an_instance_keeps_its_settings(loss: nn.Module, shape: tuple[int, ...]) -> None:
    g = _generator(str(loss))
    output, label = torch.rand(shape, generator=g), torch.rand(shape, generator=g)
    before = loss.reduction
    torch.testing.assert_close(_mean(loss, output, label.double()), loss(output, label))
    assert loss.reduction == before


def test_a_known_range_of_labels_spares_the_weights() -> None:
    plain, ignoring = LOSSES["cross_entropy"], resolve_loss(nn.CrossEntropyLoss(ignore_index=2))

    cases: list[tuple[RowLoss, tuple[float, float] | None, bool]] = [
        (plain, None, True),
        (plain, (0, 9), False),
        (LOSSES["cross_entropy_per_member"], (0, 9), False),
        (plain, (-100, 9), True),
        (ignoring, (0, 9), True),
        (ignoring, (3, 9), False),
        (resolve_loss(nn.CrossEntropyLoss(weight=W4)), (0, 3), True),
        (LOSSES["mse"], None, False),
    ]
    for loss, label_range, weighs in cases:
        assert (row_weights(loss, find_ignored_label(loss, label_range)) is not None) == weighs


def test_the_ignored_label_is_known_where_a_label_may_be_it() -> None:
    minus_one = resolve_loss(nn.CrossEntropyLoss(ignore_index=-1))
    assert isinstance(minus_one, ClassLoss)
    assert minus_one.ignored == find_ignored_label(minus_one) == find_ignored_label(minus_one, (-1, 3)) == -1
    assert find_ignored_label(minus_one, (0, 3)) is None
    assert find_ignored_label(resolve_loss(nn.NLLLoss(ignore_index=0)), (0, 3)) == 0
    assert find_ignored_label(LOSSES["cross_entropy_per_member"], (-100, 3)) == -100
    assert find_ignored_label(LOSSES["mse"]) is find_ignored_label(resolve_loss("MultiMarginLoss")) is None


def test_losses_are_computed_in_fp32() -> None:
    output, label = torch.tensor([1000.0, 1.0]), torch.tensor([0.0, 1.001])
    for dtype in (torch.float16, torch.bfloat16):
        rows = LOSSES["mse"](output.to(dtype), label)
        assert rows.dtype == torch.float32
        # The square overflows in fp16, and bf16 loses the second difference.
        torch.testing.assert_close(rows, (output - label) ** 2)
    criterion = Criterion([Head(label="y", loss="cross_entropy")])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert criterion.rows([torch.randn(2, 3).bfloat16()], [torch.tensor([0, 1])]).dtype == torch.float32


@pytest.mark.parametrize("name", ["cross_entropy_per_member", "bce_with_logits_per_member", "mse_per_member"])
def test_members_are_held_against_the_label_one_by_one(name: str) -> None:
    g = _generator(name)
    width = 3 if name.startswith("cross") else 1
    label = torch.randint(0, 2, (ROWS,), generator=g).double()
    members = [torch.randn(ROWS, width, generator=g) for _ in range(4)]
    together = LOSSES[name](torch.stack(members, dim=1), label)
    apart = torch.stack([LOSSES[name](member, label) for member in members]).mean(0)
    torch.testing.assert_close(together, apart)


# Common ways to write a loss in torch for a network with one output.
ONE_A_ROW: list[Any] = [
    lambda output, label: (output.squeeze(1) - label) ** 2,
    lambda output, label: (output[:, 0] - label) ** 2,
    lambda output, label: (output - label.view(-1, 1)) ** 2,
    lambda output, label: (output - label.unsqueeze(1)).square(),
]


def test_labels_of_a_row_loss_keep_their_row() -> None:
    """(batch, 1) outputs and (batch,) labels must not broadcast to (batch, batch)."""
    output, label = torch.tensor([[1.0], [2.0]]), torch.tensor([1.0, 4.0])
    for loss in ("mse", nn.MSELoss(), *ONE_A_ROW):
        assert resolve_loss(loss)(output, label).tolist() == [0.0, 4.0]


def test_a_callable_gets_output_and_label_as_they_are() -> None:
    shapes = []

    def loss(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        shapes.append((output.shape, label.shape))
        return output.flatten(1).sum(1)

    for output, label in (((4, 1), (4,)), ((4, 1), (4, 1)), ((4, 3), (4,)), ((4, 2, 3), (4, 3))):
        resolve_loss(loss)(torch.zeros(output), torch.zeros(label))
        assert shapes[-1] == (output, label)


def test_a_callable_may_give_a_value_per_element_or_position() -> None:
    """As many columns as rows are no broadcast."""
    three_by_three = torch.arange(9.0).view(3, 3)
    per_row = resolve_loss(lambda o, y: (o - y.unsqueeze(1)) ** 2)(three_by_three, torch.zeros(3))
    torch.testing.assert_close(per_row, (three_by_three**2).mean(1))
    logits, tokens = torch.randn(4, 3, 5), torch.randint(0, 3, (4, 5))
    loss = resolve_loss(lambda o, y: nn.functional.cross_entropy(o, y, reduction="none"))
    expected = nn.functional.cross_entropy(logits, tokens, reduction="none").mean(1)
    torch.testing.assert_close(loss(logits, tokens), expected)


def _squares(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return (output - label) ** 2


# Loss, shapes of output and label, message.
REFUSED: list[tuple[Any, list[tuple[int, ...]], str]] = [
    (
        _squares,
        [(5, 1), (5,)],
        r"one value per row, shape \(5,\), got \(5, 5\) from output .* and label .*; "
        r"compare output.squeeze\(-1\) with label, or output with label.unsqueeze\(-1\)",
    ),
    (
        _squares,
        [(2,), (2, 1)],
        r"compare output with label.squeeze\(-1\), or output.unsqueeze\(-1\) with label",
    ),
    (_squares, [(3,), (3, 3)], "one value per row"),
    (lambda o, y: o.sum(2), [(4, 3, 5), (4, 5)], r"got \(4, 3\) .*; average over everything but the rows"),
    (lambda o, y: _squares(o, y).mean(), [(3,), (3,)], r"return one value per row, shape \(3,\), got \(\)"),
    *(
        (name, shapes, f"output and label of one shape, got {got}")
        for name in ("mse", "SmoothL1Loss", "PoissonNLLLoss", "MultiLabelSoftMarginLoss")
        for shapes, got in (([(4, 3), (4,)], r"\(4, 3\) and \(4,\)"), ([(4, 1), (4, 2)], ""))
    ),
    ("cross_entropy", [(2, 3, 4), (2, 4)], "cast the label column to an integer type"),
    (nn.MSELoss(reduction="sum"), [], "MSELoss has reduction='sum'.* use reduction='mean'"),
    *(
        (n, [], f"loss '{n}' does not fit .*: it .*; compute it in a callable")
        for n in NOT_OF_OUTPUT_AND_LABEL
    ),
    *(
        (getattr(nn, n)(), [], "does not fit")
        for n in sorted({*NOT_OF_OUTPUT_AND_LABEL} - {"LinearCrossEntropyLoss"})
    ),
    ("mseloss", [], "loss must be one of .*got 'mseloss'; did you mean 'MSELoss'"),
    ("SmoothL1", [], "loss must be one of .*got 'SmoothL1'; did you mean 'SmoothL1Loss'"),
]


@pytest.mark.parametrize(("loss", "shapes", "message"), REFUSED)
def test_what_is_no_loss_of_rows_is_refused(loss: Any, shapes: list[tuple[int, ...]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_loss(loss)(*map(torch.zeros, shapes))


def test_a_module_of_the_users_loses_its_reduction() -> None:
    class Scaled(nn.SmoothL1Loss):
        def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(input, target)

    loss = Scaled()
    assert resolve_loss(loss)(torch.zeros(3), torch.tensor([0.0, 1.0, 2.0])).tolist() == [0.0, 1.0, 3.0]
    assert loss.reduction == "mean"


def test_several_losses_add_up_by_their_own_means() -> None:
    g = _generator("several")
    w = torch.rand(ROWS, generator=g)
    outputs = (torch.randn(ROWS, 4, generator=g), torch.randn(ROWS, 1, generator=g))
    labels = (torch.tensor([0, 1, 2, 3, 3, 1, 0]), torch.randn(ROWS, generator=g))
    class_loss = nn.CrossEntropyLoss(weight=W4)
    criterion = Criterion(
        [Head(label="class", loss=class_loss, weight=0.25), Head(label="y", loss="mse", weight=2.0)]
    )
    rows, weights = criterion.rows(outputs, labels), criterion.row_weights(labels)
    assert weights is not None
    assert rows.shape == weights.shape == (ROWS, 2)
    means = (rows * w[:, None]).sum(0) / (weights * w[:, None]).sum(0)
    each = nn.functional.cross_entropy(outputs[0], labels[0], W4, reduction="none")
    expected = [
        (each * w).sum() / (W4[labels[0]] * w).sum(),
        ((outputs[1][:, 0] - labels[1]) ** 2 * w).sum() / w.sum(),
    ]
    torch.testing.assert_close(means, torch.stack(expected))
    assert math.isclose(criterion.total(means), 0.25 * expected[0] + 2.0 * expected[1], rel_tol=1e-6)


def test_losses_without_row_weights_have_none_together() -> None:
    criterion = Criterion([Head(label="class", loss="cross_entropy"), Head(label="y", loss="mse")])
    assert criterion.row_weights([torch.zeros(2), torch.zeros(2)]) is None
