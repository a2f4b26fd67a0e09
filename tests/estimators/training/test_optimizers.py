"""Optimizers: the registry, parameter groups, and factories, also on several ranks."""

import copy
import json
import subprocess
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import cycle, islice
from typing import Any, cast

import numpy as np
import pytest
import torch
from ranks import run_one, run_ranks
from registries import optimizer_names
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from ringspark.estimators.collectives import Collective
from ringspark.estimators.parallel.data.gradient_all_reduce import synchronize
from ringspark.estimators.parallel.optimizer_state import load_by_name, state_by_name
from ringspark.estimators.training.build import build_optimizer
from ringspark.estimators.training.optimizers.groups import check_groups, group_parameters
from ringspark.estimators.training.optimizers.registry import ELEMENTWISE, make_optimizer

OWN = ("adafactor", "adam8bit", "adamw8bit", "lamb", "lars", "sm3")


def _module() -> nn.Module:
    torch.manual_seed(0)
    layers = {"encoder": nn.Linear(3, 4), "norm": nn.LayerNorm(4), "head": nn.Linear(4, 1)}
    return nn.Sequential(OrderedDict(layers))


@pytest.mark.extras
def test_adam1bit_is_adamw_until_its_second_moments_are_kept() -> None:
    """After the freeze an update is linear in the gradients, even for a parameter with a late first one."""
    ours, theirs = nn.Parameter(torch.tensor([3.0, -1.0])), nn.Parameter(torch.tensor([3.0, -1.0]))
    late = nn.Parameter(torch.ones(1))
    optimizer = make_optimizer("adam1bit", [ours, late], 0.05, 0.1)
    other = torch.optim.AdamW([theirs], lr=0.05, weight_decay=0.1)
    for number in range(5):
        ours.grad = theirs.grad = torch.tensor([1.0, -2.0]) * (number + 1)
        optimizer.step()
        other.step()
    torch.testing.assert_close(ours, theirs)
    cast(Any, optimizer).freeze_variance()
    kept = optimizer.state[ours]["exp_avg_sq"].clone()
    ours.grad, late.grad = torch.tensor([100.0, 0.0]), torch.tensor([2.0])
    optimizer.step()
    assert optimizer.state[ours]["exp_avg_sq"].equal(kept)
    # Adam's first step has the size of the rate, after weight decay.
    assert late.item() == pytest.approx(1 - 0.05 * 0.1 - 0.05)
    other_state = optimizer.state_dict()
    again = make_optimizer("adam1bit", [nn.Parameter(torch.ones(size)) for size in (2, 1)], 1, 0)
    again.load_state_dict(other_state)
    assert again.param_groups[0]["is_frozen"]


@pytest.mark.extras
def test_adam1bit_counts_on_after_it_was_loaded() -> None:
    """torch casts a loaded state to bf16, which has no 401."""
    weights = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer = make_optimizer("adam1bit", [weights], 0.01, 0.0)
    weights.grad = torch.ones_like(weights)
    optimizer.step()
    for key in ("step", "squares"):
        optimizer.state[weights][key].fill_(401.0)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()
    assert optimizer.state[weights]["squares"] == optimizer.state[weights]["step"] == 402


@pytest.mark.extras
def test_adam1bit_moves_a_weight_without_a_gradient_till_then_by_no_leap() -> None:
    """The frozen second moment is 0, and the first gradient may be compression noise."""
    weights, dead = nn.Parameter(torch.zeros(8)), nn.Parameter(torch.zeros(1))
    optimizer = make_optimizer("adam1bit", [weights, dead], 0.01, 0.0)
    for number in range(20):
        dead.grad = torch.zeros(1)
        weights.grad = torch.tensor([1.0, -1, 1, -1, 1, -1, 1, 0]) * (1 if number % 2 else -1)
        optimizer.step()
    cast(Any, optimizer).freeze_variance()
    before = weights.detach().clone()
    weights.grad, dead.grad = torch.ones(8), torch.ones(1)
    optimizer.step()
    assert abs(dead.item()) < 2 * 0.01
    moved = (weights.detach() - before).abs()
    assert moved[:7].max() < 2 * 0.01
    # A normal gradient, at no more than 32 times the rate, a tenth of it at once.
    assert 0 < moved[7] < 32 * 0.01


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_adam_is_fused_where_all_parameters_are_on_one_kind_of_device(name: str) -> None:
    """Uses fake tensors, which need no GPU; fused parameters take torch's own step."""
    with FakeTensorMode():
        on_gpu, on_cpu = (nn.Parameter(torch.ones(4, device=device)) for device in ("cuda", "cpu"))
        on_gpu.grad = torch.ones(4, device="cuda")
        fused = make_optimizer(name, [{"params": [on_gpu], "lr": 0.5}], 0.1, 0.0)
        fused.step()
        mixed = make_optimizer(name, iter([on_gpu, on_cpu]), 0.1, 0.0)
        of_cpu = make_optimizer(name, [on_cpu], 0.1, 0.0)
        imaginary = nn.Parameter(torch.ones(4, device="cuda", dtype=torch.complex64))
        of_both = make_optimizer(name, [on_gpu, imaginary], 0.1, 0.0)
    assert [o.param_groups[0]["fused"] for o in (fused, of_cpu, mixed, of_both)] == [True, True, None, None]
    assert [optimizer.param_groups[0]["lr"] for optimizer in (fused, mixed)] == [0.5, 0.1]
    assert fused.state[on_gpu]["step"].device.type == "cuda"


@pytest.mark.parametrize("name", optimizer_names())
def test_every_optimizer_decays_weights_and_takes_groups(name: str) -> None:
    module = _module()
    groups = [{"params": "encoder.*", "learningRate": 0.5, "weightDecay": 0.25}]
    optimizer = build_optimizer(name, module, groups, learning_rate=0.1, weight_decay=0.0)
    assert [g["lr"] for g in optimizer.param_groups] == [0.5, 0.1]
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.25, 0.0]
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    for p in module.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    # All gradients are zero, so only weight decay changes parameters.
    moved = [n for n, p in module.named_parameters() if not p.equal(before[n])]
    assert moved == ["encoder.weight", "encoder.bias"]


LAYOUTS = {
    "row by row": lambda: torch.ones(4, 3, 2, 2),
    "channels last": lambda: torch.ones(4, 3, 2, 2).to(memory_format=torch.channels_last),
    "column by column": lambda: torch.ones(3, 4).t(),
    "with gaps": lambda: torch.ones(4, 6)[:, :3],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_adam_goes_on_alike_from_a_saved_state_whatever_the_order_in_memory(name: str, layout: str) -> None:
    """torch's fused CPU kernel ignores strides, and a saved state is contiguous."""
    weights, states = [], []
    for is_saved in (False, True):
        module = nn.Module()
        module.weight = nn.Parameter(LAYOUTS[layout]())
        optimizer = make_optimizer(name, module.parameters(), 0.1, 0.1)
        _steps(optimizer, [module.weight], 3, seed=2)
        if is_saved:
            saved = copy.deepcopy(state_by_name(module, optimizer))
            rows = {key: value.contiguous() for key, value in saved["weight"].items()}
            load_by_name(module, optimizer, {"weight": rows})
        _steps(optimizer, [module.weight], 3, seed=3)
        weights.append(module.weight.detach())
        states.append(optimizer.state[module.weight]["exp_avg"])
    reference = nn.Parameter(torch.ones(weights[0].shape))
    plain = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[name]
    optimizer = plain([reference], lr=0.1, weight_decay=0.1)
    for seed in (2, 3):
        _steps(optimizer, [reference], 3, seed=seed)
    assert weights[1].equal(weights[0])
    assert states[1].stride() == states[0].stride()
    torch.testing.assert_close(weights[0], reference.detach())


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_adam_reads_gradients_as_they_lie_in_memory(name: str) -> None:
    """A user's hook may set a column-major gradient."""
    weights = []
    for is_turned in (False, True):
        weight = nn.Parameter(torch.ones(4, 3))
        optimizer = make_optimizer(name, [weight], 0.1, 0.0)
        for gradient in (torch.arange(12.0).view(4, 3), -torch.ones(4, 3)):
            weight.grad = gradient.t().contiguous().t() if is_turned else gradient
            optimizer.step()
        weights.append(weight.detach())
    assert weights[1].equal(weights[0])


def _gradients(*shapes: tuple[int, ...], seed: int = 0) -> Iterator[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield [torch.randn(shape, generator=generator) for shape in shapes]


def _parameters(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
    return [nn.Parameter(values) for values in next(_gradients(*shapes, seed=1))]


def _steps(
    optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], num_steps: int, seed: int
) -> None:
    gradients = _gradients(*(p.shape for p in parameters), seed=seed)
    for _ in range(num_steps):
        for parameter, gradient in zip(parameters, next(gradients), strict=True):
            parameter.grad = gradient
        optimizer.step()


# Bytes of state per weight of a 512 x 256 matrix, without the step count of 4 bytes per matrix.
LINES = 4 * (512 + 256) / (512 * 256)
STATE_BYTES = {
    "sgd": 0.0,
    **dict.fromkeys(["adafactor", "sm3"], LINES),
    **dict.fromkeys(["adam8bit", "adamw8bit"], 2 + 2 * 4 / 256),
    **dict.fromkeys(["momentum", "rmsprop", "adagrad", "lars"], 4.0),
    **dict.fromkeys(["adam", "adamw", "adamax", "nadam", "radam", "adadelta", "adam1bit", "lamb"], 8.0),
}


def _state_bytes(name: str, device: str) -> int:
    matrix = nn.Parameter(torch.empty(512, 256, device=device))
    optimizer = make_optimizer(name, [matrix], 0.01, 0.1)
    matrix.grad = torch.ones_like(matrix)
    optimizer.step()
    state = optimizer.state[matrix].values()
    return sum(value.numel() * value.element_size() for value in state if value.numel() > 1)


@pytest.mark.parametrize("name", optimizer_names())
def test_the_bytes_of_state_per_weight_are_known_also_without_memory(name: str) -> None:
    assert _state_bytes(name, "cpu") == _state_bytes(name, "meta") == STATE_BYTES[name] * 512 * 256


@pytest.mark.parametrize("name", optimizer_names())
def test_a_parameter_without_a_gradient_stays(name: str) -> None:
    used, unused = _parameters((4, 3), (4, 3))
    before = unused.detach().clone()
    optimizer = make_optimizer(name, [used, unused], 0.1, 0.5)
    used.grad = torch.ones_like(used)
    optimizer.step()
    assert unused.equal(before)


@pytest.mark.parametrize("name", optimizer_names())
def test_the_rate_of_a_group_can_be_changed_between_steps(name: str) -> None:
    (weights,) = _parameters((80, 64))
    optimizer = make_optimizer(name, [weights], 0.1, 0.0)
    _steps(optimizer, [weights], 1, seed=2)
    before = weights.detach().clone()
    optimizer.param_groups[0]["lr"] = 0.0
    if name == "lars":
        optimizer.param_groups[0]["momentum"] = 0.0  # its buffer would depend on past rates
    _steps(optimizer, [weights], 1, seed=3)
    assert weights.equal(before)


@pytest.mark.parametrize("name", optimizer_names())
def test_elementwise_optimizers_are_those_that_update_slices_alike(name: str) -> None:
    (whole,) = _parameters((80, 64))
    cuts = [1020, 4100]  # the longer shard is large enough for 8-bit moments
    parameters = [whole, *(nn.Parameter(part.clone()) for part in whole.detach().flatten().split(cuts))]
    optimizers = [make_optimizer(name, [p], 0.01, 0.1) for p in parameters]
    generator = torch.Generator().manual_seed(2)
    for _ in range(3):
        gradient = torch.randn(80, 64, generator=generator)
        values = (gradient, *gradient.flatten().split(cuts))
        for parameter, optimizer, value in zip(parameters, optimizers, values, strict=True):
            parameter.grad = value.clone()
            optimizer.step()
    difference = (whole.detach().flatten() - torch.cat([p.detach() for p in parameters[1:]])).abs().max()
    assert bool(difference < 1e-6) is (name in ELEMENTWISE)


class Launches(TorchDispatchMode):
    """Records the operations that are no views; a view launches nothing on a GPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.functions.append(func)
        return func(*args, **(kwargs or {}))

    def __enter__(self) -> Any:
        self.functions: list[Any] = []
        return super().__enter__()


@pytest.mark.extras
@pytest.mark.parametrize("name", ["adam1bit", *OWN])
def test_a_step_launches_at_most_60_operations_for_any_number_of_parameters(name: str) -> None:
    shapes = [(96, 64), (64,), (4, 3, 3, 3), (70, 60), (7,)]
    for number in (5, 40):
        parameters = _parameters(*islice(cycle(shapes), number))
        optimizer = make_optimizer(name, parameters, 0.01, 0.1)
        _steps(optimizer, parameters, 1, seed=2)
        with Launches() as launches:
            optimizer.step()
        assert len(launches.functions) <= 60
        assert torch.ops.aten._local_scalar_dense.default not in launches.functions


@pytest.mark.extras
@pytest.mark.parametrize("name", ["adam1bit", *OWN])
def test_our_own_optimizers_refuse_sparse_gradients_with_the_remedy(name: str) -> None:
    embedding = nn.Embedding(5, 3, sparse=True)
    optimizer = make_optimizer(name, embedding.parameters(), 0.1, 0.0)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match=r"takes dense real gradients, got a sparse one .* sparse=False"):
        optimizer.step()


def _moved_by(name: str, shapes: list[tuple[int, ...]], step: Callable[..., None]) -> None:
    """Checks 6 optimizer steps against `step` (number, weights, gradient, state)."""
    parameters = _parameters(*shapes)
    expected = [p.detach().double() for p in parameters]
    states: list[dict[Any, Any]] = [{} for _ in shapes]
    optimizer = make_optimizer(name, parameters, 0.02, 0.1)
    gradients = _gradients(*shapes, seed=5)
    for number in range(1, 7):
        for p, weights, state, gradient in zip(parameters, expected, states, next(gradients), strict=True):
            p.grad = gradient
            step(number, weights, gradient.double(), state)
        optimizer.step()
        for p, weights in zip(parameters, expected, strict=True):
            torch.testing.assert_close(p.detach().double(), weights, atol=1e-6, rtol=1e-5)


@pytest.mark.extras
def test_lamb_is_the_papers_algorithm_2() -> None:
    def step(t: int, weights: torch.Tensor, gradient: torch.Tensor, state: dict[Any, Any]) -> None:
        state["m"] = 0.9 * state.get("m", 0.0) + 0.1 * gradient
        state["v"] = 0.999 * state.get("v", 0.0) + 0.001 * gradient**2
        r = (state["m"] / (1 - 0.9**t)) / ((state["v"] / (1 - 0.999**t)).sqrt() + 1e-6) + 0.1 * weights
        ratio = weights.norm() / r.norm() if weights.dim() > 1 else 1.0
        weights -= 0.02 * ratio * r

    _moved_by("lamb", [(5, 3), (4,), (2, 3, 2)], step)


@pytest.mark.extras
def test_lars_is_the_papers_algorithm_1() -> None:
    def step(t: int, weights: torch.Tensor, gradient: torch.Tensor, state: dict[Any, Any]) -> None:
        rate = 0.001 * weights.norm() / (gradient.norm() + 0.1 * weights.norm()) if weights.dim() > 1 else 1.0
        state["v"] = 0.9 * state.get("v", 0.0) + 0.02 * rate * (gradient + 0.1 * weights)
        weights -= state["v"]

    _moved_by("lars", [(5, 3), (4,), (2, 3, 2)], step)


@pytest.mark.extras
def test_sm3_is_the_papers_sm3_ii_with_lines_as_the_cover() -> None:
    def step(t: int, weights: torch.Tensor, gradient: torch.Tensor, state: dict[Any, Any]) -> None:
        sums = torch.zeros_like(weights)
        sets = [(dim, i) for dim in range(weights.dim()) for i in range(weights.shape[dim])]
        for index in np.ndindex(*weights.shape):
            covers = [state.get((dim, i), 0.0) for dim, i in enumerate(index)]
            sums[index] = min(covers) + gradient[index] ** 2
        for dim, i in sets:
            state[dim, i] = sums.select(dim, i).max().item()
        weights *= 1 - 0.02 * 0.1
        weights -= 0.02 * gradient / sums.sqrt()

    _moved_by("sm3", [(5, 3), (4,), (2, 3, 2)], step)


@pytest.mark.extras
def test_adafactor_is_torchs() -> None:
    shapes = [(5, 3), (4,), (2, 3, 4), ()]
    ours, theirs = _parameters(*shapes), _parameters(*shapes)
    optimizers = [
        make_optimizer("adafactor", ours, 0.02, 0.1),
        torch.optim.Adafactor(theirs, lr=0.02, weight_decay=0.1),
    ]
    for optimizer, parameters in zip(optimizers, (ours, theirs), strict=True):
        _steps(optimizer, parameters, 10, seed=4)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


@pytest.mark.extras
@pytest.mark.parametrize(("name", "full"), [("adam8bit", "adam"), ("adamw8bit", "adamw")])
def test_8_bit_moments_move_weights_like_32_bit_ones(name: str, full: str) -> None:
    ours, theirs = _parameters((300, 40), (9,)), _parameters((300, 40), (9,))
    start = ours[0].detach().clone()
    for optimizer, parameters in ((name, ours), (full, theirs)):
        _steps(make_optimizer(optimizer, parameters, 0.01, 0.1), parameters, 20, seed=4)
    moved = (theirs[0] - start).norm()
    assert (ours[0] - theirs[0]).norm() < 0.03 * moved
    assert not ours[0].equal(theirs[0])
    # Small parameters have fp32 moments.
    torch.testing.assert_close(ours[1], theirs[1], atol=1e-6, rtol=1e-5)


@pytest.mark.extras
def test_8_bit_moments_of_a_large_parameter_are_those_of_its_parts(monkeypatch: Any) -> None:
    from ringspark.extras.optimizers.adam8bit import BLOCK_SIZE

    whole, chunked = _parameters((300, 41)), _parameters((300, 41))
    _steps(make_optimizer("adam8bit", whole, 0.01, 0.1), whole, 5, seed=4)
    monkeypatch.setattr("ringspark.extras.optimizers.adam8bit.CHUNK", 4 * BLOCK_SIZE)
    _steps(make_optimizer("adam8bit", chunked, 0.01, 0.1), chunked, 5, seed=4)
    assert whole[0].equal(chunked[0])


@pytest.mark.extras
def test_8_bit_moments_do_not_depend_on_what_follows_the_parameter_in_its_last_block() -> None:
    whole = _parameters((17 * 256,))[0].detach()
    whole[4200:] = 0
    short, long = nn.Parameter(whole[:4200].clone()), nn.Parameter(whole)
    optimizer = make_optimizer("adam8bit", [short, long], 0.01, 0.0)
    (gradient,) = next(_gradients((4200,)))
    for sign in (1, -1, 1, -1):  # so that the moments shrink
        short.grad, long.grad = sign * gradient, nn.functional.pad(sign * gradient, (0, 152))
        optimizer.step()
    assert short.equal(long[:4200])


@pytest.mark.extras
def test_8_bit_steps_copy_a_transposed_gradient_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringspark.extras.optimizers.adam8bit.CHUNK", 1024)
    (parameter,) = _parameters((64, 80))
    parameter.grad = torch.ones(80, 64).t()
    with Launches() as launches:
        make_optimizer("adam8bit", [parameter], 0.01, 0.0).step()
    assert launches.functions.count(torch.ops.aten.clone.default) == 1


@pytest.mark.extras
def test_a_transposed_parameter_takes_8_bit_steps_too() -> None:
    (plain,) = _parameters((64, 80))
    transposed = nn.Parameter(plain.detach().clone().T.contiguous().T)
    assert not transposed.is_contiguous()
    for parameter in (plain, transposed):
        _steps(make_optimizer("adam8bit", [parameter], 0.01, 0.0), [parameter], 3, seed=4)
    assert plain.equal(transposed)


@pytest.mark.extras
@pytest.mark.parametrize("signed", [True, False])
def test_quantized_values_are_the_nearest_levels_and_never_lose_a_second_moment(signed: bool) -> None:
    from ringspark.extras.optimizers.adam8bit import BLOCK_SIZE, Quantizer, make_levels

    table = make_levels(signed)
    assert len(table) == len(set(table)) == 256
    assert (table[0] < 0) is signed
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0)) ** 3
    values = values if signed else values.abs()
    values[:300] *= 1e-9  # one block of tiny values, and one of tiny and large values
    quantizer = Quantizer(signed, torch.device("cpu"))
    codes, scales = quantizer.quantize(values)
    assert (codes.dtype, len(codes), len(scales)) == (torch.uint8, 1000, 4)
    back = quantizer.dequantize(codes, scales)
    scale = scales.repeat_interleave(BLOCK_SIZE)[:1000]
    distances = (values[:, None] / scale[:, None] - torch.tensor(table)).abs()
    nearest = distances.min(1).values
    # fp16 chooses between two levels: 2**-11 of the value.
    slack = (values / scale).abs() * 2**-11 + 3e-8
    error = (back / scale - values / scale).abs()
    rounded_up = (codes == 1) & (not signed)
    assert (error <= nearest + slack)[~rounded_up].all()
    if not signed:
        assert rounded_up.any()
        assert (back[values > 0] > 0).all()
    assert quantizer.dequantize(*quantizer.quantize(torch.zeros(300))).equal(torch.zeros(300))


def test_the_first_match_wins_and_the_rest_comes_last() -> None:
    module = _module()
    groups = [
        {"params": ["*.bias", "norm.*"], "weightDecay": 0.0},
        {"params": "encoder.*", "learningRate": 1e-5},
    ]
    made = group_parameters(module, groups, learning_rate=0.1, weight_decay=0.01)
    names = {p: n for n, p in module.named_parameters()}
    assert [[names[p] for p in g["params"]] for g in made] == [
        ["encoder.bias", "norm.bias", "head.bias", "norm.weight"],
        ["encoder.weight"],
        ["head.weight"],
    ]
    assert [(g["lr"], g["weight_decay"]) for g in made] == [(0.1, 0.0), (1e-5, 0.01), (0.1, 0.01)]


def test_a_group_for_all_leaves_no_default_group_and_frozen_parameters_belong_to_none() -> None:
    module = _module()
    module.get_submodule("encoder").requires_grad_(False)
    (only,) = group_parameters(module, [{"params": "*"}], 0.1, 0.0)
    assert len(only["params"]) == 4


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (["encoder.*"], r"pattern 'encoder.\*', which matches no trainable parameter"),
        (["haed.weight"], r"parameterGroups\[0\] .*'haed.weight'.*did you mean 'head.weight'"),
        (["head.*", ["norm.*", "head.bias"]], r"Groups\[1\] .*'head.bias'.* put the narrower pattern first"),
    ],
)
def test_patterns_that_match_nothing_are_refused(groups: list[Any], message: str) -> None:
    module = _module()
    module.get_submodule("encoder").requires_grad_(False)
    with pytest.raises(ValueError, match=message):
        group_parameters(module, [{"params": params} for params in groups])


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({"params": "x"}, "must be a list of dicts, got dict"),
        ("x", "must be a list of dicts, got str"),
        (["x"], r"parameterGroups\[0\] must be a dict, got str"),
        ([{"params": "x", "lr": 0.1}], r"takes the keys .*got 'lr'"),
        ([{"params": "x", "learning_rate": 0.1}], r"got 'learning_rate'; did you mean 'learningRate'"),
        ([{"learningRate": 0.1}], r"parameterGroups\[0\] needs 'params', .* got None"),
        ([{"params": []}], "needs 'params'"),
        ([{"params": [1]}], "needs 'params'"),
        ([{"params": torch.ones(2)}], "needs 'params'"),
        ([{"params": "x", "learningRate": 0}], "needs a learningRate above 0, got 0"),
        ([{"params": "x", "learningRate": float("nan")}], "needs a learningRate above 0, got nan"),
        ([{"params": "x", "weightDecay": -1}], "needs a weightDecay 0 or above, got -1"),
        ([{"params": "x", "weightDecay": True}], "needs a weightDecay 0 or above, got True"),
        ([{"params": "x", "weightDecay": "0"}], "needs a weightDecay 0 or above, got '0'"),
    ],
)
def test_malformed_groups_are_refused_in_one_sentence(groups: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_groups(groups)


def test_checked_groups_are_plain_json() -> None:
    groups = [{"params": "a.*", "learningRate": 1}, {"params": ("b", "c"), "weightDecay": 0}]
    checked = check_groups(groups)
    assert json.loads(json.dumps(checked)) == checked
    assert check_groups(checked) == checked
    assert checked[0] == {"params": ["a.*"], "learningRate": 1.0}


def test_a_factory_gets_parameters_or_groups_with_what_they_state_only() -> None:
    module = _module()
    given: list[Any] = []

    def factory(parameters: Any) -> torch.optim.Optimizer:
        given.append(parameters)
        return torch.optim.SGD(parameters, lr=0.7, weight_decay=0.3)

    assert build_optimizer(factory, module, None, 0.1, 0.2).param_groups[0]["lr"] == 0.7
    assert all(isinstance(p, nn.Parameter) for p in given[0])
    grouped = build_optimizer(factory, module, [{"params": "head.*", "learningRate": 0.5}], 0.1, 0.2)
    assert [(g["lr"], g["weight_decay"]) for g in grouped.param_groups] == [(0.5, 0.3), (0.7, 0.3)]


OTHER = nn.Linear(2, 2)


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate:UserWarning")
@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (lambda p: "adam", "must return a torch.optim.Optimizer, got str"),
        (
            lambda p: torch.optim.SGD(OTHER.parameters()),
            "gets the .* trainable parameters of .* its optimizer holds other parameters or none",
        ),
        (lambda p: torch.optim.SGD([*p, *OTHER.parameters()]), "holds other parameters or none"),
        (lambda p: torch.optim.LBFGS(p), "LBFGS evaluates the loss several times per step"),
        (lambda p: torch.optim.SGD([*p, p[0]]), "holds a parameter twice"),
    ],
)
def test_a_factory_must_give_an_optimizer_of_the_modules_parameters(factory: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_optimizer(factory, _module(), None, 0.1, 0.0)


def test_a_factory_that_leaves_parameters_out_is_warned_of() -> None:
    module = _module()
    with pytest.warns(UserWarning, match=r"leaves out 4 trainable parameters; .*'encoder.weight'"):
        build_optimizer(lambda p: torch.optim.SGD(p[4:]), module, None, 0.1, 0.0)


FACTORIES = {
    "two groups": lambda p: torch.optim.AdamW([{"params": p[:2], "lr": 0.01}, {"params": p[2:]}], lr=0.05),
    "a first state": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.5),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "left out": lambda p: torch.optim.SGD(p[2:], lr=0.1),
}


def _wide() -> nn.Module:
    """Returns a network in which only one weight is large enough for 8-bit moments."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 2048), nn.Tanh(), nn.Linear(2048, 1))


CASES: dict[str, tuple[Callable[[], nn.Module], Any, list[dict[str, Any]]]] = {
    **{name: (_module, factory, []) for name, factory in FACTORIES.items()},
    **{name: (_wide, name, [{"params": "0.weight", "learningRate": 0.02}]) for name in OWN},
}


def _weights(collective: Collective) -> Any:
    """Returns the weights after five steps over twelve rows split over the ranks, for each case."""
    warnings.filterwarnings("ignore", "optimizer leaves out")
    rows = torch.randn(5, 12, 3, generator=torch.Generator().manual_seed(1))
    result = {}
    for name, (make, spec, groups) in CASES.items():
        module = make()
        sync = synchronize(module, build_optimizer(spec, module, groups, 0.005, 0.1), collective)
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        for batch in rows:
            mine = batch[collective.rank :: collective.size]
            sync.optimizer.zero_grad()
            with sync.micro_batch(last=True):
                ((sync.module(mine) - 1).square().sum() / len(batch) * sync.loss_factor).backward()
            sync.reduce()
            sync.step(scaler)
        result[name] = torch.cat([p.detach().flatten() for p in module.parameters()]).tolist()
    return result


@pytest.mark.extras
def test_factories_and_our_own_optimizers_train_alike_on_several_ranks(collective: str) -> None:
    expected = run_one(_weights)
    for text in run_ranks(2, collective, _weights):
        for case, weights in text.items():
            # Gradients reduced in a different order may round to a different code of 256.
            tolerance = 2e-3 if "8bit" in case else 1e-5
            difference = torch.tensor(weights) - torch.tensor(expected[case])
            assert difference.abs().max() < tolerance, case


# Importing the compiler later restores torch's own code.
SCRIPT = """
import json, sys
import torch
from ringspark.estimators.training.optimizers.registry import (
    OPTIMIZERS,
    defer_compiler_import,
    make_optimizer,
)

def is_loaded():
    return "torch._dynamo" in sys.modules

loaded = {}
for name in OPTIMIZERS:
    defer_compiler_import()
    weight = torch.nn.Parameter(torch.ones(2, 2))
    optimizer = make_optimizer(name, [weight], 0.1, 0.0)
    weight.grad = torch.ones(2, 2)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.zero_grad()
    assert weight.grad is None
    loaded[name] = is_loaded()
import torch._dynamo
zero_grad = torch.optim.Optimizer.zero_grad.__wrapped__
ours = zero_grad.__dynamo_disable
weight.grad = torch.ones(2, 2)
optimizer.zero_grad()
assert weight.grad is None
loaded["ours stays"] = zero_grad.__dynamo_disable is ours
print(json.dumps(loaded))
"""


@pytest.mark.telling
@pytest.mark.extras
def test_no_optimizer_imports_the_compiler_before_its_first_step() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    loaded = json.loads(done.stdout)
    assert len(loaded) > 10
    assert not any(loaded.values()), loaded
