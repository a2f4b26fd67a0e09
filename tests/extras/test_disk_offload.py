"""Networks with disk offload compute the result of the same networks in memory."""

import weakref
from collections.abc import Callable
from functools import partial

import networks_of_a_user as own
import pytest
import torch
from small_networks import Net
from torch import nn

from ringspark.extras.disk_offload import offload_to_disk
from ringspark.models import ModelSpec
from ringspark.models.meta_device import copy_to_meta, fill
from ringspark.models.program import Program

Tensors = dict[str, torch.Tensor]


class Memory:
    def __init__(self, state: Tensors, small: int = 0) -> None:
        self.state, self.small = {name: tensor.clone() for name, tensor in state.items()}, small
        self.read_names: list[str] = []
        self.announced: list[str] = []
        self.held: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self.most_held = 0

    def fill(self, module: nn.Module) -> nn.Module:
        small = {name: tensor for name, tensor in self.state.items() if tensor.numel() <= self.small}
        fill(module, {name: tensor.to("meta") for name, tensor in self.state.items()} | small)
        offload_to_disk(module, self)
        return module

    def announce(self, name: str) -> None:
        self.announced.append(name)

    def read(self, name: str) -> torch.Tensor:
        self.read_names.append(name)
        given = self.state[name].clone()
        self.held.add(given.untyped_storage())
        self.most_held = max(self.most_held, len(self.held))
        return given


class Tied(nn.Module):
    """Ties an embedding to a linear layer and uses the matrix in three places."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)
        self.head.weight = self.table.weight
        self.scales = nn.ParameterList([nn.Parameter(torch.randn(8))])
        self.register_buffer("steady", torch.full((8,), 3.0), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.table(ids).mean(1) * self.scales[0] * self.steady
        dtype = next(self.parameters()).dtype
        return self.head(hidden) + nn.functional.linear(hidden.to(dtype), self.table.weight)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(64, 1)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        return self.line(x) + self.calls


def words(*shape: int) -> torch.Tensor:
    return torch.randint(0, 20, shape)


SIZES = {"vocab_size": 20, "max_seq_len": 6, "dim": 8, "depth": 2, "num_heads": 2}
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], list[torch.Tensor]]]] = {
    "convolutions": (own.Residual, lambda: [torch.randn(4, 3, 8, 8)]),
    "fused encoder": (own.Encoder, lambda: [words(4, 5), torch.ones(4, 5)]),
    # Cross-attention multiplies with slices of a weight, for which torch may choose another kernel.
    "encoder and decoder": (
        partial(nn.Transformer, 8, 2, 1, 1, 16, batch_first=True),
        lambda: [torch.randn(4, 5, 8), torch.randn(4, 3, 8)],
    ),
    "recurrent": (own.Recurrent, lambda: [torch.randn(4, 7, 3)]),
    "table": (own.Table, lambda: [words(4), torch.randn(4, 3)]),
    "tied": (Tied, lambda: [words(4, 6)]),
    "counting": (Counting, lambda: [torch.randn(4, 64)]),
    "language model": (ModelSpec("transformer_lm", SIZES).build, lambda: [words(3, 6)]),
}


@pytest.mark.parametrize("small", [0, 40])
@pytest.mark.parametrize("case", CASES)
def test_predictions_are_those_of_all_weights_to_the_bit(case: str, small: int) -> None:
    torch.manual_seed(5)
    build, inputs = CASES[case]
    whole = build().eval()
    source = Memory(whole.state_dict(), small)
    streamed = source.fill(copy_to_meta(whole)).eval()
    given = inputs()
    with torch.inference_mode():
        for _ in range(2):
            torch.testing.assert_close(streamed(*given), whole(*given), rtol=0, atol=0)
    wide = {name for name, tensor in source.state.items() if tensor.numel() > small}
    assert set(source.read_names) <= wide
    assert source.read_names
    torch.testing.assert_close(streamed.state_dict(), whole.state_dict(), rtol=0, atol=0)


def test_a_weight_is_held_for_the_operation_that_uses_it() -> None:
    whole = nn.Sequential(*(nn.Linear(8, 8) for _ in range(10))).eval()
    source = Memory(whole.state_dict())
    streamed = source.fill(copy_to_meta(whole))
    with torch.inference_mode():
        streamed(torch.randn(2, 8))
    # Weight and bias of one layer, out of 20 tensors.
    assert source.most_held == 2
    assert len(source.held) == 0


def test_a_program_holds_its_weights_one_by_one_too() -> None:
    # A network may have any tensor names.
    weight = {"dtype": "float32", "shape": [8, 8], "kind": "parameter"}
    layers = [{"name": f"tensor.{i}.weight", **weight} for i in range(10)]
    steps = [["aten.linear.default", [{"at": 10 + i}, {"at": i}], {}] for i in range(10)]
    text = {"format_version": 1, "torch": torch.__version__, "num_inputs": 1, "single": True}
    program = Program(text | {"outputs": [{"at": 20}], "tensors": layers, "steps": steps})
    whole = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(10))).eval()
    source = Memory({f"tensor.{name}": tensor for name, tensor in whole.state_dict().items()})
    source.fill(program)
    rows = torch.randn(2, 8)
    with torch.inference_mode():
        torch.testing.assert_close(program(rows), whole(rows), rtol=0, atol=0)
    assert source.most_held == 1


def test_the_next_weights_are_announced_but_for_tables_of_which_rows_are_looked_up() -> None:
    whole = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    source = Memory(whole.state_dict())
    streamed = source.fill(copy_to_meta(whole))
    with torch.inference_mode():
        streamed(words(3))
        assert source.announced == ["1.weight", "2.weight"]
        source.announced.clear()
        streamed(words(3))
    # From the second pass on, the order is known; after the last weight comes the first one again.
    assert source.announced == ["1.weight", "1.weight", "2.weight", "2.weight"]


def test_gradients_reach_the_inputs() -> None:
    """Explanations need the gradients of the inputs."""
    whole = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    streamed = Memory(whole.state_dict()).fill(copy_to_meta(whole))
    rows = torch.randn(3, 4, requires_grad=True)
    (expected,) = torch.autograd.grad(whole(rows).sum(), rows)
    (found,) = torch.autograd.grad(streamed(rows).sum(), rows)
    assert torch.equal(found, expected)


def test_a_weight_that_is_used_from_a_list_is_refused_unless_it_is_kept() -> None:
    """torch would multiply with a meta tensor and return arbitrary numbers."""
    wide, small = nn.Parameter(torch.randn(4, 16)), nn.Parameter(torch.randn(16, 2))
    parts = {"wide": wide, "small": small, "steps": [wide, small]}
    whole, rows = Net(lambda self, x: x @ self.steps[0] @ self.steps[1], **parts), torch.randn(3, 4)
    kept = Memory(whole.state_dict(), small=64).fill(copy_to_meta(whole))
    assert torch.equal(kept(rows), whole(rows))
    for size in (0, 32):
        with pytest.raises(ValueError, match=r"took from a list or variable"):
            Memory(whole.state_dict(), size).fill(copy_to_meta(whole))(rows)


def test_a_weight_that_the_state_dict_changes_is_refused() -> None:
    class Packed(nn.Linear):
        def _save_to_state_dict(self, destination: Tensors, prefix: str, keep_vars: bool) -> None:
            destination[f"{prefix}weight"] = self.weight * 2
            destination[f"{prefix}bias"] = self.bias

    module = copy_to_meta(Packed(2, 2))
    with pytest.raises(ValueError, match="omits or changes 'weight' of its Packed"):
        offload_to_disk(module, Memory(Packed(2, 2).state_dict()))


def test_weights_get_the_dtype_of_the_network() -> None:
    half = nn.Linear(4, 2).to(torch.bfloat16)
    streamed = Memory(half.state_dict()).fill(copy_to_meta(nn.Linear(4, 2)))
    rows = torch.randn(3, 4)
    assert torch.equal(streamed(rows), half.float()(rows))
