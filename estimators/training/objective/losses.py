"""Computes losses per row in fp32 or wider, so that weights and uneven shards are exact.

A loss maps (output, label) to one value per row, (batch,). The sum of the values divided by the sum of the
rows' weights (`criterion.row_weights`), over the GLOBAL batch, equals the torch loss with reduction='mean',
also with class weights and ignored positions.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.loss import _Loss

from ringspark.estimators.names import nearest
from ringspark.estimators.training.objective.deviance import POWERS, Deviance, find_power
from ringspark.estimators.user_code import signature_of

RowLoss = Callable[..., torch.Tensor]
RowWeights = Callable[[torch.Tensor], torch.Tensor]

# Name of a `NetworkLoss` in `TrainConfig.losses`.
NETWORK_LOSS = "(module, inputs, outputs, labels)"

# Losses of torch.nn that take other arguments than (output, label), and why.
NOT_OF_OUTPUT_AND_LABEL = {
    "CTCLoss": "it also takes the lengths of inputs and targets",
    "CosineEmbeddingLoss": "it compares two outputs",
    "GaussianNLLLoss": "it also takes a variance",
    "LinearCrossEntropyLoss": "it has its own weights, which belong in the model",
    "MarginRankingLoss": "it compares two outputs",
    "TripletMarginLoss": "it compares three outputs",
    "TripletMarginWithDistanceLoss": "it compares three outputs",
}
# Labels are class numbers or probabilities, so output and label may differ in shape.
CLASS_LOSSES = (nn.CrossEntropyLoss, nn.NLLLoss)
MULTI_CLASS_LOSSES = (nn.MultiLabelMarginLoss, nn.MultiLabelSoftMarginLoss, nn.MultiMarginLoss)


def match_shapes(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """Returns an output of shape (batch,) or (batch, 1) with as many dimensions as the label."""
    if output.dim() == label.dim() + 1 and output.shape[-1] == 1:
        return output.squeeze(-1)
    if label.dim() == output.dim() + 1 and label.shape[-1] == 1:
        return output.unsqueeze(-1)
    return output


def _row_means(values: torch.Tensor) -> torch.Tensor:
    return values.flatten(1).mean(1) if values.dim() > 1 else values


def _at_least_fp32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


class ElementLoss:
    """A torch loss that compares each element of the output with an element of the label."""

    def __init__(self, loss: nn.Module) -> None:
        self._sums = loss.reduction == "batchmean"
        self._loss = _copy_unreduced(loss)

    def __call__(self, output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        output = match_shapes(_at_least_fp32(output), label)
        if output.shape != label.shape:
            # PyTorch would compare every prediction with every row's label.
            raise ValueError(
                f"the loss needs output and label of one shape, got {tuple(output.shape)} and "
                f"{tuple(label.shape)}; change the last layer, or use a '..._per_member' loss"
            )
        values = self._loss(output, label.to(output.dtype))
        return values.flatten(1).sum(1) if self._sums and values.dim() > 1 else _row_means(values)


class ClassLoss:
    """Cross entropy or NLL with class numbers per row or position, or with probabilities.

    Class numbers per row may be floats, as in Spark.

    Attributes:
        ignored: Class number of rows and positions that do not count.
        unreduced: The torch loss with reduction "none".
    """

    def __init__(self, loss: nn.CrossEntropyLoss | nn.NLLLoss) -> None:
        self.unreduced = _copy_unreduced(loss)
        self._loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = self.unreduced
        self._class_weights: torch.Tensor | None = loss.weight
        self.ignored: int = loss.ignore_index

    def __call__(self, output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        output = _at_least_fp32(output)
        label = self._numbers(label)
        if label.is_floating_point():
            if label.dim() != output.dim():
                raise ValueError(
                    "the loss takes class numbers per position as integers, or probabilities in the shape "
                    f"of the output {tuple(output.shape)}, got floating labels {tuple(label.shape)}; "
                    "cast the label column to an integer type"
                )
            label = label.to(output.dtype)
        elif label.dim() == output.dim() and label.shape[-1] == 1:
            label = label.squeeze(-1)
        return _row_means(self._loss(output, label))

    def with_function(self, loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> ClassLoss:
        """Returns a copy that computes the values by another function."""
        other = copy.copy(self)
        other._loss = loss
        return other

    def row_weights(self, label: torch.Tensor) -> torch.Tensor:
        label = self._numbers(label)
        if label.is_floating_point():  # probabilities, over which torch averages without class weights
            return torch.ones(len(label), device=label.device)
        kept = label != self.ignored
        if self._class_weights is None:
            return _row_means(kept.float())
        # An ignored index may lie outside the classes, so look it up as class 0; it gets weight 0.
        weights = self._class_weights.to(label.device)[label.where(kept, 0)]
        return _row_means(weights * kept)

    @property
    def weighs_classes(self) -> bool:
        return self._class_weights is not None

    @staticmethod
    def _numbers(label: torch.Tensor) -> torch.Tensor:
        if label.dim() == 2 and label.shape[-1] == 1 and label.is_floating_point():
            label = label.squeeze(-1)
        return label.long() if label.dim() == 1 or not label.is_floating_point() else label


class MultiClassLoss:
    """A torch loss that itself reduces over the classes, such as a margin or multi-label loss."""

    def __init__(self, loss: nn.Module) -> None:
        self._takes_numbers = not isinstance(loss, nn.MultiLabelSoftMarginLoss)
        self._takes_one = isinstance(loss, nn.MultiMarginLoss)
        self._loss = _copy_unreduced(loss)

    def __call__(self, output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        output = _at_least_fp32(output)
        label = label.long() if self._takes_numbers else label.to(output.dtype)
        if self._takes_one:
            label = label.squeeze(-1) if label.dim() == 2 else label
        else:
            label = match_shapes(label, output)
            if label.shape != output.shape:
                raise ValueError(
                    "the loss needs output and label of one shape, "
                    f"got {tuple(output.shape)} and {tuple(label.shape)}; change the last layer"
                )
        return _row_means(self._loss(output, label))


class CallableLoss:
    """A user's callable or module (output, label) -> one value per row.

    Attributes:
        row_weights: The callable's own method (label) -> weight of each row in the divisor; None without one.
    """

    def __init__(self, loss: Callable[..., torch.Tensor]) -> None:
        self._loss = loss
        self.row_weights: RowWeights | None = getattr(loss, "row_weights", None)

    def __call__(self, output: torch.Tensor, label: torch.Tensor, *network: Any) -> torch.Tensor:
        output = _at_least_fp32(output)
        values = self._loss(*network, output, label)
        rows = len(label)
        rule = f"loss must return one value per row, shape ({rows},)"
        if not isinstance(values, torch.Tensor) or values.dim() == 0 or len(values) != rows:
            given = tuple(values.shape) if isinstance(values, torch.Tensor) else type(values).__name__
            raise ValueError(f"{rule}, got {given}; drop the mean over rows (reduction='none')")
        # Or one value per element of a row, but not for each pair of rows, (batch, 1) with (batch,): its mean
        # would train a constant. So the label's shape does not count if only the label has several
        # dimensions.
        fitting = [(rows,), (rows, 1), output.shape, *([label.shape] if output.dim() > 1 else [])]
        if values.shape not in fitting:
            raise ValueError(
                f"{rule}, got {tuple(values.shape)} from output {tuple(output.shape)} and label "
                f"{tuple(label.shape)}; {_remedy(output, label)}"
            )
        return _row_means(values)


class NetworkLoss(CallableLoss):
    """A user's loss (module, inputs, output, label) -> (rows,).

    Call it with (output, label, module, inputs).
    """


def sees_network(loss: object) -> bool:
    """Returns whether a loss takes (module, inputs, outputs, labels): four arguments without defaults."""
    parameters = signature_of(loss).parameters
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in positional and p.default is p.empty for p in parameters.values()) == 4


def name_loss(loss: object) -> str:
    """Returns the entry of a loss in `TrainConfig.losses`."""
    return loss if isinstance(loss, str) else NETWORK_LOSS if sees_network(loss) else type(loss).__name__


def _remedy(output: torch.Tensor, label: torch.Tensor) -> str:
    if output.dim() == label.dim() + 1 and output.shape[-1] == 1:
        return "compare output.squeeze(-1) with label, or output with label.unsqueeze(-1)"
    if label.dim() == output.dim() + 1 and label.shape[-1] == 1:
        return "compare output with label.squeeze(-1), or output.unsqueeze(-1) with label"
    return "average over everything but the rows"


class PinballLoss:
    """Pinball loss, averaged over the quantiles; for the median it is half of the absolute error.

    Koenker and Bassett 1978, "Regression Quantiles".
    """

    def __init__(self, quantiles: Sequence[float], device: torch.device | None = None) -> None:
        self._quantiles = torch.tensor(quantiles, device=device)

    def __call__(self, output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        """Maps (batch, quantiles) outputs and (batch,) or (batch, 1) labels to (batch,)."""
        if output.numel() != len(label) * len(self._quantiles) or label.numel() != len(label):
            raise ValueError(
                f"the pinball loss needs {len(self._quantiles)} outputs and one label per row, got "
                f"{tuple(output.shape)} and {tuple(label.shape)}; set quantiles, or give one label"
            )
        output = _at_least_fp32(output).reshape(len(label), len(self._quantiles))
        errors = label.reshape(-1, 1).to(output.dtype) - output
        return torch.maximum(self._quantiles * errors, (self._quantiles - 1) * errors).mean(1)


class MemberLoss:
    """Averages a loss over ensemble members, which return (batch, members, ...) in training."""

    def __init__(self, loss: ElementLoss | ClassLoss | PinballLoss) -> None:
        self.member = loss

    def __call__(self, output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        if output.dim() < 3:
            return self.member(output, label)
        batch, members = output.shape[:2]
        rows = self.member(output.flatten(0, 1), label.repeat_interleave(members, dim=0))
        return rows.view(batch, members).mean(1)


def _copy_unreduced(loss: nn.Module) -> nn.Module:
    loss = copy.copy(loss)
    if hasattr(loss, "reduction"):
        if loss.reduction == "sum":
            raise ValueError(
                f"loss {type(loss).__name__} has reduction='sum', but the loss of a batch is a mean, so that "
                "batchSize does not scale the gradient; use reduction='mean'"
            )
        loss.reduction = "none"  # type: ignore[assignment]
    return loss


def _wrap_module(loss: nn.Module) -> RowLoss:
    if isinstance(loss, _Loss):
        _check_arguments(type(loss).__name__)
    if isinstance(loss, CLASS_LOSSES):
        return ClassLoss(loss)
    if isinstance(loss, MULTI_CLASS_LOSSES):
        return MultiClassLoss(loss)
    if isinstance(loss, _Loss) and type(loss).__module__ == _Loss.__module__:
        return ElementLoss(loss)
    return _wrap_callable(_copy_unreduced(loss))


def _wrap_callable(loss: Callable[..., torch.Tensor]) -> CallableLoss:
    given = None if isinstance(loss, nn.Module) else signature_of(loss).parameters.get("reduction")
    if given is not None and given.default == "mean":
        loss = partial(loss, reduction="none")  # a function of torch.nn.functional returns a mean by default
    return (NetworkLoss if sees_network(loss) else CallableLoss)(loss)


def _check_arguments(name: str) -> None:
    if name in NOT_OF_OUTPUT_AND_LABEL:
        raise ValueError(
            f"loss {name!r} does not fit (output, label): {NOT_OF_OUTPUT_AND_LABEL[name]}; "
            "compute it in a callable (output, label) -> one value per row"
        )


LOSSES: dict[str, RowLoss] = {
    "cross_entropy": ClassLoss(nn.CrossEntropyLoss()),
    "cross_entropy_per_member": MemberLoss(ClassLoss(nn.CrossEntropyLoss())),
    "bce_with_logits": ElementLoss(nn.BCEWithLogitsLoss()),
    "bce_with_logits_per_member": MemberLoss(ElementLoss(nn.BCEWithLogitsLoss())),
    "mse": ElementLoss(nn.MSELoss()),
    "mse_per_member": MemberLoss(ElementLoss(nn.MSELoss())),
    # For the median; with the setting quantiles, `resolve_loss` returns the loss of these quantiles.
    "pinball_per_member": MemberLoss(PinballLoss((0.5,))),
    "l1": ElementLoss(nn.L1Loss()),
    "huber": ElementLoss(nn.HuberLoss()),
    **{name: ElementLoss(Deviance(power)) for name, power in POWERS.items()},
    **{f"{name}_per_member": MemberLoss(ElementLoss(Deviance(power))) for name, power in POWERS.items()},
}


def default_loss(task: str, output_width: int) -> str:
    """Returns the loss for `loss="auto"`; `output_width` is the size of the last output dimension."""
    if task == "classification":
        return "bce_with_logits" if output_width == 1 else "cross_entropy"
    return "mse"


@cache
def _torch_losses() -> dict[str, type[nn.Module]]:
    """Returns the torch.nn losses that take (output, label), by class name."""
    excluded = {*NOT_OF_OUTPUT_AND_LABEL, "NLLLoss2d"}  # the deprecated name of NLLLoss
    return {
        name: value
        for name, value in vars(nn).items()
        if isinstance(value, type) and issubclass(value, _Loss) and name not in excluded
    }


def loss_names() -> list[str]:
    """Returns the names that `loss` accepts: our own, then the class names of torch.nn."""
    return [*LOSSES, *sorted(_torch_losses())]


def check_loss_name(name: str) -> None:
    _check_arguments(name)
    if find_power(name) is None and name not in loss_names():
        raise ValueError(
            f"loss must be one of {sorted(LOSSES)}, the class name of a loss in torch.nn, an instance of "
            f"one, or a callable, got {name!r}{nearest(name, loss_names())}"
        )


def resolve_loss(
    loss: str | Callable[..., torch.Tensor],
    device: torch.device | None = None,
    quantiles: Sequence[float] = (),
) -> RowLoss:
    """Returns the per-row form of a loss; raises ValueError if it does not take (output, label).

    Args:
        loss: A name of `loss_names()`, a torch.nn loss, or a callable.
        device: Device for class weights and the state of a user's module.
        quantiles: Quantiles of "pinball_per_member".
    """
    if isinstance(loss, str):
        if quantiles and loss == "pinball_per_member":
            return MemberLoss(PinballLoss(quantiles, device))
        if loss in LOSSES:
            return LOSSES[loss]
        if (power := find_power(loss)) is not None:
            made = ElementLoss(Deviance(power))
            return MemberLoss(made) if loss.endswith("_per_member") else made
        check_loss_name(loss)
        return _wrap_module(_torch_losses()[loss]())
    if isinstance(loss, nn.Module):
        return _wrap_module(loss.to(device))
    return _wrap_callable(loss)
