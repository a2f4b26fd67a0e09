"""Memory of N blocks under activation checkpointing: bytes saved for backward, the peak, recomputed FLOPs.

Counted, not timed, and not from the process: every allocation and every release of torch's CPU allocator,
as `torch.profiler` records them (on CUDA what its caching allocator counts), from just before a forward pass
to the end of its backward pass. Gradients exist before, so that they are no part of it.

- saved: allocated in the forward pass and alive at its end, where only the graph holds it.
- peak: the most that was allocated at one time in forward and backward together.
- recomputed: FLOPs of the backward pass above those without checkpointing, by FLOPs of one forward pass.

The exponent is the slope of the least-squares line through (log N, log(bytes(N) - bytes(0))), where bytes(0)
is measured on the same network without blocks: embeddings, head and loss, which no checkpointing touches.
Nothing else is taken off, and no N is left out.

    python tests/benchmarks/checkpoint_memory.py --chart docs/checkpoint_memory.png

`--rows` is the size of the batch.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import harness
import numpy as np
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from ringspark.models import MLP, TransformerLM, apply_activation_checkpoint

DEPTHS = (4, 16, 64, 256)
POLICIES = ("none", "all", "sqrt")
ROWS = 16
VOCAB, SEQ, DIM = 64, 32, 32
MLP_DIM, MLP_ROWS = 64, 32  # So many times the rows of the transformer, which has SEQ tokens in each.
MIB = 1 << 20
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

Make = Callable[[int, int], tuple[nn.Module, torch.Tensor]]


@dataclass(frozen=True, kw_only=True)
class Count:
    """What one forward and backward pass took.

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
    """One forward and backward pass; the network without blocks is never checkpointed."""
    torch.manual_seed(0)
    net, inputs = make(depth, rows)
    net, inputs = net.to(DEVICE), inputs.to(DEVICE)
    if depth:
        apply_activation_checkpoint(net, policy)
    # Makes the gradients, and what the first use of a kernel allocates for good.
    with FlopCounterMode(display=False) as forward:
        loss = net(inputs).square().mean()
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    del loss
    gc.collect()
    saved, peak = _bytes(lambda: net(inputs).square().mean())
    return Count(
        saved=saved,
        peak=peak,
        forward_flops=forward.get_total_flops(),
        backward_flops=backward.get_total_flops(),
    )


def _bytes(forward: Callable[[], torch.Tensor]) -> tuple[int, int]:
    """Bytes alive after the forward pass, and the peak of forward and backward, above the start."""
    if DEVICE.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        loss = forward()
        saved = torch.cuda.memory_allocated() - start
        loss.backward()
        return saved, torch.cuda.max_memory_allocated() - start
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        loss = forward()
        with torch.profiler.record_function("end of forward"):
            pass
        loss.backward()
    assert profiler.profiler is not None
    events = profiler.profiler.kineto_results.events()
    end = next(e.start_ns() for e in events if e.name() == "end of forward")
    changes = sorted((e.start_ns(), i, e.nbytes()) for i, e in enumerate(events) if e.name() == "[memory]")
    return sum(size for at, _, size in changes if at <= end), max(accumulate(size for *_, size in changes))


def exponent(values: Mapping[int, int], without_blocks: int) -> float:
    """Slope of the least-squares line through (log N, log(bytes(N) - bytes(0)))."""
    depths = np.array(list(values), dtype=float)
    above = np.array(list(values.values()), dtype=float) - without_blocks
    return float(np.polyfit(np.log(depths), np.log(above), 1)[0])


Results = dict[str, dict[int, Count]]  # Policy -> N -> counts; "none" also has N = 0.


def measure(make: Make, rows: int) -> Results:
    """All depths and policies of one family."""
    empty = count(make, 0, "none", rows)
    return {
        policy: {0: empty} | {depth: count(make, depth, policy, rows) for depth in DEPTHS}
        for policy in POLICIES
    }


def exponents(counts: Mapping[int, Count]) -> tuple[float, float]:
    """Of what is saved, and of the peak."""
    saved = exponent({n: counts[n].saved for n in DEPTHS}, counts[0].saved)
    return saved, exponent({n: counts[n].peak for n in DEPTHS}, counts[0].peak)


def print_results(family: str, results: Results, rows: int) -> None:
    """One line a policy and depth, and the exponents."""
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
        saved, peak = exponents(results[policy])
        print(f"{policy}: bytes above those without blocks: N^{saved:.3f} saved, N^{peak:.3f} at the peak")


def draw_chart(path: str, all_results: Mapping[str, Results]) -> None:
    """Peaks over N, both axes logarithmic; one panel a family."""
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
                values = [(getattr(counts[n], kind) - getattr(counts[0], kind)) / MIB for n in DEPTHS]
                power = exponents(counts)[kind == "peak"]
                label = f"{policy}, {kind}: $N^{{{power:.2f}}}$"
                axes.plot(DEPTHS, values, style, color=color, label=label, markersize=5)
        axes.set(title=family, xlabel="blocks N", xscale="log", yscale="log")
        axes.set_xticks(DEPTHS, [str(n) for n in DEPTHS])
        axes.minorticks_off()
        axes.grid(visible=True, color="0.92")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    panels[0][0].set_ylabel("MiB above the network without blocks")
    figure.savefig(path, dpi=150)
    plt.close(figure)
    print(f"chart: {path}")


def parse() -> argparse.Namespace:
    """The command line: the options of all benchmarks, and the chart."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    harness.add_options(parser)
    parser.add_argument("--chart", metavar="PATH", help="draw the bytes into this PNG; needs matplotlib")
    parser.set_defaults(repeats=1, rows=ROWS)
    return parser.parse_args()


def main(families: Sequence[str] = tuple(FAMILIES)) -> None:
    """Measures once: counts do not change from run to run."""
    args = parse()
    all_results = {family: measure(FAMILIES[family], args.rows) for family in families}
    for family, results in all_results.items():
        print_results(family, results, args.rows)
    if args.chart is not None:
        draw_chart(args.chart, all_results)


if __name__ == "__main__":
    main()
