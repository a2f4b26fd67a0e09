"""What a config refuses: one table of single settings, one of settings that do not go together.

Each rule has a sentence with subject, rule, what was given and what to do. `docs/settings.md` prints the
second table.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, get_args

from ringspark.estimators.training.optimizers import ELEMENTWISE, OPTIMIZERS
from ringspark.estimators.training.settings.choices import (
    Compression,
    Keep,
    NonFinite,
    Offload,
    Precision,
    Sharding,
)

if TYPE_CHECKING:
    from ringspark.estimators.training.settings.config import TrainConfig

_OF_WHOLE_PARAMETERS = frozenset(OPTIMIZERS) - ELEMENTWISE

# When a config breaks the rule, and the sentence; the config's values are put into its braces.
Rule = tuple[Callable[["TrainConfig"], bool], str]


class Combination(NamedTuple):
    """Settings that do not go together, in a user's words; when a config has them; the sentence."""

    settings: str
    is_broken: Callable[[TrainConfig], bool]
    message: str


def _bad_checkpointing(policy: str | tuple[str, ...]) -> bool:
    if isinstance(policy, tuple):
        return not policy
    return policy not in ("none", "sqrt", "all") and not (policy.isdigit() and int(policy) > 0)


SETTINGS: tuple[Rule, ...] = (
    (lambda c: c.num_workers < 1, "numWorkers must be at least 1, got {num_workers}"),
    (lambda c: c.epochs < 1, "epochs must be at least 1, got {epochs}"),
    (
        lambda c: c.gradient_accumulation < 1,
        "gradientAccumulation must be at least 1 micro-batch per step, got {gradient_accumulation}",
    ),
    (
        lambda c: not 0 < c.learning_rate < math.inf,
        "learningRate must be above 0 and finite, got {learning_rate}",
    ),
    (
        lambda c: len(set(c.label_columns)) < len(c.label_columns),
        "labelCols must not name a column twice, got {label_columns}; copy it under another name",
    ),
    (lambda c: c.weight_decay < 0, "weightDecay must not be negative, got {weight_decay}"),
    (
        lambda c: c.max_grad_norm is not None and not c.max_grad_norm > 0,
        "maxGradNorm must be above 0, got {max_grad_norm}; leave it unset for no clipping",
    ),
    (lambda c: c.warmup_steps < 0, "warmupSteps must not be negative, got {warmup_steps}"),
    (
        lambda c: c.patience is not None and c.patience < 1,
        "patience must be at least 1 epoch, got {patience}; leave it unset for no early stopping",
    ),
    (lambda c: not c.min_delta >= 0, "minDelta must not be negative, got {min_delta}"),
    (lambda c: c.keep not in get_args(Keep), "keep must be 'last' or 'best', got '{keep}'"),
    (
        lambda c: not all(w >= 0 for w in c.loss_weights) or not any(c.loss_weights),
        "lossWeights must not be negative and not all be 0, got {loss_weights}",
    ),
    (
        lambda c: not 0 < c.timeout_seconds < math.inf,
        "timeoutSeconds must be above 0 and finite, got {timeout_seconds}",
    ),
    (
        lambda c: c.checkpoint_every_steps is not None and c.checkpoint_every_steps < 1,
        "checkpointEverySteps must be at least 1, got {checkpoint_every_steps}; leave it unset for none by "
        "steps",
    ),
    (
        lambda c: c.checkpoint_every_epochs is not None and c.checkpoint_every_epochs < 1,
        "checkpointEveryEpochs must be at least 1, got {checkpoint_every_epochs}; leave it unset for none by "
        "epochs",
    ),
    (
        lambda c: not 0 <= c.checkpoint_every_seconds < math.inf,
        "checkpointEverySeconds must be 0 or above and finite, got {checkpoint_every_seconds}; 0 is for none "
        "by the clock",
    ),
    (lambda c: c.keep_checkpoints < 1, "keepCheckpoints must be at least 1, got {keep_checkpoints}"),
    (
        lambda c: c.on_non_finite not in get_args(NonFinite),
        "onNonFinite must be 'stop', 'skip' or 'rollback', got '{on_non_finite}'",
    ),
    (
        lambda c: c.max_restarts < 0,
        "maxRestarts must be 0 or above, got {max_restarts}; 0 is for no restart",
    ),
    (
        lambda c: c.min_workers is not None and c.min_workers < 1,
        "minWorkers must be at least 1, got {min_workers}",
    ),
    (
        lambda c: c.precision not in get_args(Precision),
        "precision must be 'fp32', 'bf16' or 'fp16', got '{precision}'",
    ),
    (
        lambda c: _bad_checkpointing(c.gradient_checkpointing),
        "gradientCheckpointing must be 'none', 'sqrt', 'all', a number of segments or a list of submodule "
        "names, got {gradient_checkpointing!r}",
    ),
    (
        lambda c: c.activation_offload not in get_args(Offload),
        "activationOffload must be 'none', 'host' or 'disk', got '{activation_offload}'",
    ),
    (
        lambda c: c.activation_compression not in get_args(Compression),
        "activationCompression must be 'none', 'bits', 'int8' or 'fp8', got '{activation_compression}'",
    ),
    (
        lambda c: c.sharding not in get_args(Sharding),
        "sharding must be 'none', 'optimizer', 'gradients' or 'parameters', got '{sharding}'",
    ),
)

COMBINATIONS: tuple[Combination, ...] = (
    Combination(
        "batchSize < numWorkers",
        lambda c: c.batch_size < c.num_workers,
        "batchSize counts rows over all workers and must be at least numWorkers ({num_workers}), "
        "got {batch_size}; raise batchSize or lower numWorkers",
    ),
    Combination(
        "gradientAccumulation * numWorkers > batchSize",
        lambda c: c.gradient_accumulation * c.num_workers > c.batch_size,
        "gradientAccumulation ({gradient_accumulation}) times numWorkers ({num_workers}) must not exceed "
        "batchSize ({batch_size}): a micro-batch would have no rows; lower gradientAccumulation or raise "
        "batchSize",
    ),
    Combination(
        "minWorkers > numWorkers",
        lambda c: c.min_workers is not None and c.min_workers > c.num_workers,
        "minWorkers ({min_workers}) must not exceed numWorkers ({num_workers}); lower minWorkers",
    ),
    Combination(
        "onNonFinite='rollback' without checkpoints",
        lambda c: (
            c.on_non_finite == "rollback"
            and not (c.checkpoint_every_steps or c.checkpoint_every_epochs or c.checkpoint_every_seconds)
        ),
        "onNonFinite 'rollback' goes back to the last checkpoint, and none is asked for; set "
        "checkpointEverySteps, checkpointEveryEpochs or checkpointEverySeconds",
    ),
    Combination(
        "loss, labelCols of different lengths",
        lambda c: len(c.losses) != len(c.label_columns),
        "loss must be one for all labels or a list with one for each of {label_columns}, got {losses}",
    ),
    Combination(
        "lossWeights, labelCols of different lengths",
        lambda c: len(c.loss_weights) != len(c.label_columns),
        "lossWeights must have one weight for each of {label_columns}, got {loss_weights}",
    ),
    Combination(
        "activationOffload='host' without useGpu",
        lambda c: c.activation_offload == "host" and not c.use_gpu,
        "activationOffload 'host' moves activations from the GPU to the host's memory, and without useGpu "
        "they are there already; set useGpu=True, or activationOffload='disk'",
    ),
    Combination(
        "sharding='parameters' with collective='horovod'",
        lambda c: c.sharding == "parameters" and c.collective == "horovod" and c.num_workers > 1,
        "sharding 'parameters' gathers each block's parameters with torch.distributed, which collective "
        "'horovod' does not have; set collective='torch', or sharding='gradients'",
    ),
    Combination(
        "sharding='parameters' with an optimizer that looks at whole parameters",
        lambda c: c.sharding == "parameters" and c.num_workers > 1 and c.optimizer in _OF_WHOLE_PARAMETERS,
        "sharding 'parameters' leaves a part of every parameter to each rank, and optimizer '{optimizer}' "
        "looks at whole ones; set optimizer='adamw', or sharding='gradients'",
    ),
    Combination(
        "sharding='parameters' with activationOffload or activationCompression",
        lambda c: (
            c.sharding == "parameters"
            and c.num_workers > 1
            and (c.activation_offload, c.activation_compression) != ("none", "none")
        ),
        "sharding 'parameters' gathers weights anew for the backward pass, and activationOffload "
        "('{activation_offload}') or activationCompression ('{activation_compression}') would pack them as "
        "activations; set both to 'none', or sharding='gradients'",
    ),
    Combination(
        "collective='local' with numWorkers > 1",
        lambda c: c.collective == "local" and c.num_workers > 1,
        "collective 'local' serves one worker, got numWorkers={num_workers}; "
        "set collective='horovod' or 'torch'",
    ),
)
