"""`Corruption`: makes the inputs and targets of a training that reconstructs its inputs.

Denoising adds Gaussian noise to the inputs (Vincent et al. 2008). Masking replaces a share of the values, and
the loss compares only the masked values (Devlin et al. 2018). The targets are always the original inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from ringspark.extras.pretraining.row_random import normal, row_keys, uniform

IGNORED = -100
"""Target of an id that the loss ignores. The target of an ignored number is NaN."""

Role = Literal["value", "valid", "other", "numbers", "ids"]
Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True, kw_only=True)
class Corruption:
    """A `transformBatch` that corrupts inputs, and returns the original inputs as labels.

    Attributes:
        roles: One entry per input. "value": numbers, or ids if they are integers. "valid": true where the
            input before it holds no padding. "other": not changed. "numbers" and "ids": a table's row.
        noise: Standard deviation of the noise that is added to numbers.
        mask: Share of the numbers and ids that are masked.
        mask_value: Replacement of a masked number: one for all, or one per number of the input.
        mask_id: Replacement of a masked id; None: ids cannot be masked.
        joins: Whether the target is one tensor with the numbers of all inputs.
    """

    roles: tuple[Role, ...]
    noise: float = 0.0
    mask: float = 0.0
    mask_value: float | tuple[float, ...] = 0.0
    mask_id: int | None = None
    joins: bool = False

    changes_held_out = True

    def __call__(
        self, *inputs: torch.Tensor, labels: torch.Tensor | Tensors, step_seed: int
    ) -> tuple[Tensors, Tensors]:
        """Returns the corrupted inputs and the targets."""
        if len(inputs) != len(self.roles):
            raise ValueError(
                f"TorchAutoencoder expected {len(self.roles)} inputs, got {len(inputs)}; set columns={{...}} "
                "with the type of each column"
            )
        keys = row_keys(inputs, step_seed)
        corrupted, targets = list(inputs), []
        for place, (role, values) in enumerate(zip(self.roles, inputs, strict=True)):
            if role in ("valid", "other"):
                continue
            has_mask = self.roles[place + 1 : place + 2] == ("valid",)
            valid = inputs[place + 1].bool() if has_mask else None
            corrupted[place], target = self._corrupt(values, valid, keys, place, role)
            targets.append(target)
        if "ids" in self.roles:
            numbers, ids = targets
            targets = [torch.cat([numbers, ids.to(numbers.dtype)], 1)]
        elif self.joins:
            targets = [torch.cat([t.float().flatten(1) if t.dim() > 1 else t[:, None] for t in targets], 1)]
        return tuple(corrupted), tuple(targets)

    def _corrupt(
        self, values: torch.Tensor, valid: torch.Tensor | None, keys: torch.Tensor, place: int, role: Role
    ) -> Tensors:
        """Returns the corrupted values and the target of one input."""
        shape, is_number = values.shape[1:], values.is_floating_point() or self.joins
        target = values.float() if is_number else values
        chosen = torch.ones_like(values, dtype=torch.bool) if valid is None else valid
        if role == "ids":
            chosen = values > 0  # id 0 is every unknown category
        if self.mask:
            chosen = chosen & (uniform(keys, shape, 2 * place) < self.mask)
            values = torch.where(chosen, self._replacement(values, role, is_number), values)
        if self.noise and is_number:
            values = values.float() + self.noise * normal(keys, shape, 2 * place + 1)
        if self.mask or not is_number:
            target = torch.where(chosen, target, float("nan") if is_number else IGNORED)
        return values, target

    def _replacement(self, values: torch.Tensor, role: Role, is_number: bool) -> torch.Tensor:
        if role == "numbers":
            return values.new_full((), float("nan"))  # the network for tables treats NaN as missing
        if role == "ids":
            return values.new_full((), 0)
        if not is_number:
            if self.mask_id is None:
                raise ValueError(
                    "mask replaces ids, but an input without a tokenizer has no known mask token; set maskId "
                    "to an id that stands for nothing else"
                )
            return values.new_full((), self.mask_id)
        wanted = values.new_tensor(self.mask_value)
        if not values.is_floating_point() and (wanted != values.double().new_tensor(self.mask_value)).any():
            raise ValueError(
                f"maskValue {self.mask_value} is no whole number, but an input has whole numbers; set whole "
                "numbers, or cast the column to double"
            )
        if wanted.dim() and wanted.shape != values.shape[1:]:
            raise ValueError(
                f"maskValue must be one number, or one per number of the input, {tuple(values.shape[1:])}, "
                f"got {len(wanted)}"
            )
        return wanted
