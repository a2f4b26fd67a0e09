"""Memory techniques, alone and combined, on one transformer: bytes, time, and the largest depth that fits.

Runs one rank without Spark. The steps use the package's own parts, and `peak_memory` counts every byte. A
measurement covers a whole run from building the network to the end of a second step, which includes the
optimizer's state. `held` is the memory between a micro-batch's forward and backward pass, without the
network. The largest depth is measured, too: it is the deepest network whose peak is within the peak of the
plain network with 4 blocks.

    make bench ARGS="memory_techniques"
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import harness
import torch
from peak_memory import memory_use, peak_bytes
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from ringspark.estimators.training.optimizers.registry import make_optimizer
from ringspark.estimators.training.precision import autocast
from ringspark.extras.activations.hooks import saved_tensor_hooks
from ringspark.models import ModelSpec, apply_activation_checkpoint

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCABULARY, SEQ, DIM, HEADS, CLASSES = 1000, 128, 128, 4, 10
DEPTH = 4
MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Technique:
    """Settings as `TrainConfig` names them."""

    precision: str = "fp32"
    checkpointing: str = "none"
    accumulation: int = 1
    offload: str = "none"
    compression: str = "none"
    optimizer: str = "adamw"


TECHNIQUES = {
    "plain": Technique(),
    "precision bf16": Technique(precision="bf16"),
    "checkpointing sqrt": Technique(checkpointing="sqrt"),
    "checkpointing all": Technique(checkpointing="all"),
    "accumulation 4": Technique(accumulation=4),
    **({"offload host": Technique(offload="host")} if DEVICE.type == "cuda" else {}),
    "offload disk": Technique(offload="disk"),
    "compression bits": Technique(compression="bits"),
    "compression int8": Technique(compression="int8"),
    "compression fp8": Technique(compression="fp8"),
    **{f"optimizer {name}": Technique(optimizer=name) for name in ("adafactor", "sm3", "adam8bit", "lamb")},
    "all together": Technique(
        precision="bf16",
        checkpointing="all",
        accumulation=4,
        offload="disk",
        compression="int8",
        optimizer="adafactor",
    ),
}


class Training:
    """One network, its optimizer and one batch of rows."""

    def __init__(self, technique: Technique, rows: int, depth: int = DEPTH) -> None:
        self.technique = technique
        torch.manual_seed(0)
        sizes = {"vocab_size": VOCABULARY, "max_seq_len": SEQ, "dim": DIM, "num_heads": HEADS}
        sizes |= {"depth": depth, "out_features": CLASSES}
        spec = ModelSpec("transformer_classifier", {**sizes, "dropout": 0.1})
        self.net: nn.Module = spec.build().to(DEVICE)
        apply_activation_checkpoint(self.net, technique.checkpointing)
        self.optimizer = make_optimizer(technique.optimizer, self.net.parameters(), 1e-3, 0.0)
        ids = torch.randint(VOCABULARY, (rows, SEQ), device=DEVICE)
        labels = torch.randint(CLASSES, (rows,), device=DEVICE)
        parts = technique.accumulation
        self.micro_batches = list(zip(ids.tensor_split(parts), labels.tensor_split(parts), strict=True))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hooks = saved_tensor_hooks(
            offload=self.technique.offload,
            compression=self.technique.compression,
            module=self.net,
            device=DEVICE,
        )
        with autocast(self.technique.precision, DEVICE), hooks:
            logits: torch.Tensor = self.net(ids)
        return logits

    def step(self) -> None:
        self.optimizer.zero_grad()
        for ids, labels in self.micro_batches:
            loss = F.cross_entropy(self.forward(ids).float(), labels) / len(self.micro_batches)
            loss.backward()
        self.optimizer.step()

    def state_bytes(self) -> int:
        leaves = tree_leaves(list(self.optimizer.state.values()))
        return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))


def two_steps(technique: Technique, rows: int, depth: int) -> None:
    """Builds a network, takes two steps, and releases everything.

    The first step creates the optimizer's state, so micro-batches of one row are enough.
    """
    training = Training(technique, rows, depth)
    batch = training.micro_batches
    training.micro_batches = [(ids[:1], labels[:1]) for ids, labels in batch]
    training.step()
    training.micro_batches = batch
    training.step()


def peak(technique: Technique, rows: int, depth: int) -> int:
    """Returns the peak memory of `two_steps`, in bytes."""
    return peak_bytes(partial(two_steps, technique, rows, depth), DEVICE.type)


def held_and_state(technique: Technique, rows: int) -> tuple[int, int]:
    """Returns the bytes between forward and backward of a micro-batch, and of the optimizer state."""
    training = Training(technique, rows)
    training.step()
    ids, _ = training.micro_batches[0]
    return memory_use(lambda: training.forward(ids), DEVICE.type).kept, training.state_bytes()


def seconds_of_step(training: Training) -> float:
    """Returns the wall time of one step, to the end of its last kernel.

    A step before it allocates the memory.
    """

    def step() -> None:
        training.step()
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()

    step()
    return harness.seconds_of(step)


def largest_depth(peak_at: Callable[[int], int], budget: int, most: int) -> int:
    """Returns the largest measured depth within the budget; the next depth was measured, too.

    Memory grows almost linearly with the number of blocks. So a line through two measured depths predicts the
    depth to try next, and a few measurements are enough.
    """
    peaks: dict[int, int] = {}
    low, high = 0, most + 1
    guess = DEPTH
    while high - low > 1:
        peaks[guess] = peak_at(guess)
        low, high = (guess, high) if peaks[guess] <= budget else (low, guess)
        if len(peaks) == 1:
            guess = 2 * guess if low else guess // 2
        else:
            # The nearest measured depths on each side of the budget.
            a, b = sorted(peaks, key=lambda depth: abs(peaks[depth] - budget))[:2]
            guess = a + int((budget - peaks[a]) * (b - a) / (peaks[b] - peaks[a]))
        guess = max(low + 1, min(guess, high - 1))
    return low


def main() -> None:
    """Measures and prints the table. Times come from interleaved rounds."""
    options = harness.parse(__doc__, rows=(16, 1), most_blocks=(128, 5))
    budget = peak(TECHNIQUES["plain"], options.rows, DEPTH)
    trainings = {name: Training(technique, options.rows) for name, technique in TECHNIQUES.items()}
    times = harness.measure_in_turns(
        {name: partial(seconds_of_step, training) for name, training in trainings.items()}, options.repeats
    )
    trainings.clear()
    lines = []
    for name, technique in TECHNIQUES.items():
        sizes = (peak(technique, options.rows, DEPTH), *held_and_state(technique, options.rows))
        depth = largest_depth(partial(peak, technique, options.rows), budget, options.most_blocks)
        lines.append(
            [
                name,
                *(f"{size / MIB:.2f}" for size in sizes),
                f"{harness.median_ratio(times[name], times['plain']):.2f}",
                f"{depth}" + ("+" if depth == options.most_blocks else ""),
            ]
        )
    harness.print_table(
        f"memory techniques on {DEVICE.type}: transformer of {DEPTH} blocks, dim {DIM}, "
        f"{options.rows} rows of {SEQ} tokens, adamw; depth within {budget / MIB:.1f} MiB",
        ["", "peak MiB", "held MiB", "state MiB", "time ratio", "depth"],
        lines,
    )


if __name__ == "__main__":
    main()
