"""Memory of N blocks under activation checkpointing: saved bytes, peak, and recomputed FLOPs.

Memory is counted by `peak_memory`. Gradients are allocated before, so they do not count.

- saved: bytes allocated in the forward pass and alive at its end, held by the graph alone.
- peak: the most bytes allocated at one time in the forward and backward pass.
- recomputed: extra FLOPs of the backward pass with checkpointing, divided by the FLOPs of one forward pass.

The exponent is the slope of the least-squares line through (log N, log(bytes(N) - bytes(0))). bytes(0) is
measured on the same network without blocks: embeddings, head and loss, which checkpointing does not change.
All N are used.

    python tests/benchmarks/checkpoint_memory.py --chart docs/checkpoint_memory.png

`--rows` is the batch size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import harness
import numpy as np
import torch
from peak_memory import memory_use, peak_bytes
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ringspark.models import MLP, TransformerLM, apply_activation_checkpoint

DEPTHS = (4, 16, 64, 256)
POLICIES = ("none", "all", "sqrt")
VOCAB, SEQ, DIM = 64, 32, 32
MLP_DIM, MLP_ROWS = 64, 32  # multiple of the transformer's rows, which have SEQ tokens each
MIB = 1 << 20
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

Make = Callable[[int, int], tuple[nn.Module, torch.Tensor]]


@dataclass(frozen=True, kw_only=True)
class Count:
    """Counts of one forward and backward pass.

    Attributes:
        saved, peak: Bytes.
        forward_flops, backward_flops: As `FlopCounterMode` counts them.
    """

    saved: int
    peak: int
    forward_flops: int
    backward_flops: int


def transformer(depth: int, rows: int) -> tuple[nn.Module, torch.Tensor]:
    """A language model of `depth` blocks with dropout, and token ids."""
    net = TransformerLM(VOCAB, SEQ, DIM, max(depth, 1), num_heads=2, dropout=0.1, attention_dropout=0.1)
    net.blocks = net.blocks[:depth]
    return net, torch.randint(0, VOCAB, (rows, SEQ))


def mlp(depth: int, rows: int) -> tuple[nn.Module, torch.Tensor]:
    """A deep MLP with normalisation and dropout, and its inputs."""
    net = MLP(MLP_DIM, [MLP_DIM] * depth, 1, activation="gelu", dropout=0.1, norm="layer")
    return net, torch.randn(rows * MLP_ROWS, MLP_DIM)


FAMILIES: dict[str, Make] = {"transformer": transformer, "deep MLP": mlp}


def count(make: Make, depth: int, policy: str, rows: int) -> Count:
    """Measures one forward and backward pass. The network without blocks is never checkpointed."""
    torch.manual_seed(0)
    net, inputs = make(depth, rows)
    net, inputs = net.to(DEVICE), inputs.to(DEVICE)
    if depth:
        apply_activation_checkpoint(net, policy)
    # Allocates the gradients, and the permanent memory of each kernel's first use.
    with FlopCounterMode(display=False) as forward_flops:
        loss = net(inputs).square().mean()
    with FlopCounterMode(display=False) as backward_flops:
        loss.backward()
    del loss

    def forward() -> torch.Tensor:
        result: torch.Tensor = net(inputs).square().mean()
        return result

    saved = memory_use(forward, DEVICE.type).kept
    peak = peak_bytes(lambda: forward().backward(), DEVICE.type)  # type: ignore[no-untyped-call]
    return Count(
        saved=saved,
        peak=peak,
        forward_flops=forward_flops.get_total_flops(),
        backward_flops=backward_flops.get_total_flops(),
    )


Results = dict[str, dict[int, Count]]  # Policy -> N -> counts; "none" also has N = 0.


def measure(make: Make, rows: int, depths: Sequence[int]) -> Results:
    """Measures all depths and policies of one model family."""
    empty = count(make, 0, "none", rows)
    return {
        policy: {0: empty} | {depth: count(make, depth, policy, rows) for depth in depths}
        for policy in POLICIES
    }


def growth(counts: Mapping[int, Count], kind: str) -> dict[int, int]:
    """Returns N -> bytes saved or at the peak, less the bytes without blocks."""
    return {depth: getattr(c, kind) - getattr(counts[0], kind) for depth, c in counts.items() if depth}


def exponent(above: Mapping[int, int]) -> float:
    """Returns the slope of the least-squares line through (log N, log(bytes(N) - bytes(0)))."""
    return float(np.polyfit(np.log(list(above)), np.log(list(above.values())), 1)[0])


def print_results(family: str, results: Results, rows: int) -> None:
    """Prints a line per policy and depth, and the exponents."""
    lines = []
    for policy, counts in results.items():
        for depth, c in counts.items():
            if depth == 0 and policy != "none":
                continue
            plain = results["none"][depth]
            extra = (c.backward_flops - plain.backward_flops) / plain.forward_flops
            lines.append(
                [
                    policy if depth else "no blocks",
                    *(str(depth), f"{c.saved / MIB:.3f}", f"{c.peak / MIB:.3f}"),
                    *(f"{plain.peak / c.peak:.2f}", f"{extra:.3f}"),
                ]
            )
    header = ["", "N", "saved MiB", "peak MiB", "none's peak / peak", "recomputed / forward"]
    harness.print_table(f"checkpoint_memory: {family}, {rows} rows, {DEVICE.type}", header, lines)
    for policy in POLICIES:
        saved, peak = (exponent(growth(results[policy], kind)) for kind in ("saved", "peak"))
        print(f"{policy}: bytes above those without blocks: N^{saved:.3f} saved, N^{peak:.3f} at the peak")


def draw_chart(path: str, all_results: Mapping[str, Results]) -> None:
    """Draws peaks over N on logarithmic axes, with one panel per family."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(
        1, len(all_results), figsize=(5.5 * len(all_results), 4.4), layout="constrained", squeeze=False
    )
    for axes, (family, results) in zip(panels[0], all_results.items(), strict=True):
        for policy, color in zip(POLICIES, ("0.55", "tab:orange", "tab:blue"), strict=True):
            counts = results[policy]
            for kind, style in (("peak", "o-"), ("saved", "s:")):
                above = growth(counts, kind)
                label = f"{policy}, {kind}: $N^{{{exponent(above):.2f}}}$"
                values = [size / MIB for size in above.values()]
                axes.plot(list(above), values, style, color=color, label=label, markersize=5)
        axes.set(title=family, xlabel="blocks N", xscale="log", yscale="log")
        axes.set_xticks(list(above), [str(depth) for depth in above])
        axes.minorticks_off()
        axes.grid(visible=True, color="0.92")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    panels[0][0].set_ylabel("MiB above the network without blocks")
    figure.savefig(path, dpi=150)
    plt.close(figure)
    print(f"chart: {path}")


def main() -> None:
    """Measures once, because counts are deterministic."""
    args = harness.parse(__doc__, rows=(16, 2), depths=(len(DEPTHS), 2))
    depths = DEPTHS[: args.depths]
    all_results = {family: measure(make, args.rows, depths) for family, make in FAMILIES.items()}
    for family, results in all_results.items():
        print_results(family, results, args.rows)
    if args.chart is not None:
        draw_chart(args.chart, all_results)


if __name__ == "__main__":
    main()
