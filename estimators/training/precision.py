"""Mixed precision by autocast: parameters, gradients and optimizer state stay fp32.

bf16 has the exponent range of fp32 and needs no loss scaling; fp16 has not, so its loss is scaled
(Narang, Micikevicius et al. 2018). The scaler looks at gradients after they are summed over the
ranks: all ranks see the same numbers and skip the same steps.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """The context of a forward pass."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=DTYPES[precision])


def loss_scaler(precision: str, device: torch.device) -> torch.amp.GradScaler:
    """A gradient scaler: the identity except for fp16."""
    return torch.amp.GradScaler(device.type, enabled=precision == "fp16")
