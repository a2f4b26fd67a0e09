"""The one value that travels from the driver to every rank: frozen, JSON in and out.

Rules that concern several settings stand in `RULES`, each with its remedy; they are checked
wherever a config is made, so a bad combination never reaches Spark.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, get_args

from ringspark.pipelines import default_engine

Precision = Literal["fp32", "bf16", "fp16"]
Task = Literal["classification", "regression", "any"]


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything that decides a training, apart from the user's own Python objects.

    Attributes:
        shards_uri: Folder of the shards; its manifest is the data.
        run_uri: Folder that progress, history and checkpoints go to.
        model: `ModelSpec` as JSON text, or None where the module travels as an object.
        input_columns: One column per positional argument of `forward`.
        batch_size: Rows per optimizer step over all ranks together.
        learning_rate: As the optimizer gets it: never scaled by the number of ranks.
        max_grad_norm: Bound of the global gradient's 2-norm, None for no clipping.
        timeout_seconds: How long a rank waits for the others in one collective call.
    """

    shards_uri: str
    run_uri: str
    input_columns: tuple[str, ...]
    label_column: str
    task: Task = "any"
    model: str | None = None
    weight_column: str | None = None
    loss: str = "auto"
    optimizer: str = "adamw"
    learning_rate: float = 1e-3
    lr_schedule: str = "constant"
    weight_decay: float = 0.0
    max_grad_norm: float | None = None
    epochs: int = 1
    batch_size: int = 1024
    seed: int = 0
    shuffle: bool = True
    num_workers: int = 1
    use_gpu: bool = False
    collective: str = "horovod"
    precision: Precision = "fp32"
    gradient_checkpointing: str = "none"
    gradient_accumulation: int = 1
    reader: str = field(default_factory=default_engine)
    timeout_seconds: float = 600.0

    def __post_init__(self) -> None:
        for is_broken, message in RULES:
            if is_broken(self):
                raise ValueError(message.format(**{f.name: getattr(self, f.name) for f in fields(self)}))

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> TrainConfig:
        values = json.loads(text)
        values["input_columns"] = tuple(values["input_columns"])
        return cls(**values)


def segment_policy(text: str) -> str | int:
    """`gradientCheckpointing` as `apply_activation_checkpoint` takes it: a name, or a number of segments."""
    return int(text) if text.isdigit() else text


def _bad_checkpointing(text: str) -> bool:
    return text not in ("none", "sqrt", "all") and not (text.isdigit() and int(text) > 0)


Rule = tuple[Callable[[TrainConfig], bool], str]

RULES: tuple[Rule, ...] = (
    (lambda c: c.num_workers < 1, "numWorkers must be at least 1, got {num_workers}"),
    (lambda c: c.epochs < 1, "epochs must be at least 1, got {epochs}"),
    (
        lambda c: c.batch_size < c.num_workers,
        "batchSize counts rows over all workers and must be at least numWorkers ({num_workers}), "
        "got {batch_size}; raise batchSize or lower numWorkers",
    ),
    (
        lambda c: c.gradient_accumulation < 1,
        "gradientAccumulation must be at least 1 micro-batch per step, got {gradient_accumulation}",
    ),
    (
        lambda c: c.gradient_accumulation * c.num_workers > c.batch_size,
        "gradientAccumulation ({gradient_accumulation}) times numWorkers ({num_workers}) must not exceed "
        "batchSize ({batch_size}): a micro-batch would have no rows",
    ),
    (lambda c: not c.learning_rate > 0, "learningRate must be above 0, got {learning_rate}"),
    (lambda c: c.weight_decay < 0, "weightDecay must not be negative, got {weight_decay}"),
    (
        lambda c: c.max_grad_norm is not None and not c.max_grad_norm > 0,
        "maxGradNorm must be above 0, got {max_grad_norm}; leave it unset for no clipping",
    ),
    (lambda c: not c.timeout_seconds > 0, "timeoutSeconds must be above 0, got {timeout_seconds}"),
    (
        lambda c: c.precision not in get_args(Precision),
        "precision must be 'fp32', 'bf16' or 'fp16', got '{precision}'",
    ),
    (
        lambda c: _bad_checkpointing(c.gradient_checkpointing),
        "gradientCheckpointing must be 'none', 'sqrt', 'all' or a number of segments, "
        "got '{gradient_checkpointing}'",
    ),
    (
        lambda c: c.collective == "local" and c.num_workers > 1,
        "collective 'local' serves one worker, got numWorkers={num_workers}; "
        "set collective='horovod' or 'torch'",
    ),
)


@dataclass(frozen=True, kw_only=True)
class UserObjects:
    """What has no JSON form: the user's own module and callables; shipped with Spark's closure.

    Attributes:
        module: Used where `TrainConfig.model` is None; its present weights are the start.
        loss: `loss(output, label)`, one value per row, or an `nn` loss instance.
        optimizer: `optimizer(parameters) -> torch.optim.Optimizer`.
        lr_schedule: `lr_schedule(step, num_steps) -> factor` on the learning rate.
    """

    module: Any = None
    loss: Any = None
    optimizer: Any = None
    lr_schedule: Any = None
