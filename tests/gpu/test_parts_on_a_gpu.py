"""Each part of a step computes on a GPU what it computes on a CPU: networks, losses, optimizers, codecs."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from registries import names_of
from torch import nn
from torch.nn import functional as F

pytest.importorskip("ringspark.extras")

from ringspark.estimators.collectives.local_collective import LocalCollective
from ringspark.estimators.options.compression import Compression
from ringspark.estimators.training.feed import move_batches
from ringspark.estimators.training.optimizers.registry import OPTIMIZERS, make_optimizer
from ringspark.estimators.training.settings.config import TrainConfig
from ringspark.extras.activations.hooks import saved_tensor_hooks
from ringspark.extras.compressors import COMPRESSORS
from ringspark.models import ModelSpec, apply_activation_checkpoint
from ringspark.models.activation_checkpoint import block_names

TABLE = {"edges": [[-1.0, 0.0, 1.0]] * 3, "cardinalities": [50, 5], "out_features": 4}
TABLE |= {"unknown": 0.0, "averages": "probabilities"}
WORDS = {"vocab_size": 50, "max_seq_len": 12, "dim": 16, "num_heads": 2, "out_features": 4}
SPECS = {
    "mlp": ModelSpec("mlp", {"in_features": 16, "hidden": [32, 32], "out_features": 4, "norm": "batch"}),
    "resnet": ModelSpec("resnet", {"in_channels": 3, "out_features": 4, "depths": [1, 2], "width": 8}),
    "lstm": ModelSpec("recurrent", {"in_features": 16, "hidden": 8, "depth": 2, "out_features": 4}),
    "transformer": ModelSpec("transformer_classifier", {**WORDS, "depth": 3}),
    "experts": ModelSpec(
        "transformer_classifier",
        {**WORDS, "depth": 2, "experts": {"num_experts": 4, "router": "switch", "every": 1}},
    ),
    # Without dropout: a GPU draws other random numbers than the CPU.
    "tabpack": ModelSpec("tabpack", {**TABLE, "dropouts": [0.0, 0.0], "rates": [1.0, 0.5]}),
    "tabm": ModelSpec("tabm", {**TABLE, "dropout": 0.0, "members": 4}),
    "tabular": ModelSpec(
        "tabular", {"cardinalities": [50, 50], "num_numeric": 3, "hidden": [16], "out_features": 4}
    ),
}
SHAPES = [torch.Size((60, 50)), torch.Size((8, 4, 16)), torch.Size((33, 40))]


def inputs_of(name: str, rows: int = 32) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    if name == "tabular":
        ids = torch.randint(0, 50, (rows, 2), generator=generator)
        return ids, torch.randn(rows, 3, generator=generator)
    if name in ("tabpack", "tabm"):
        numbers = torch.randn(rows, 3, generator=generator)
        ids = torch.randint(0, 5, (rows, 2), generator=generator)
        return numbers.masked_fill(numbers > 1.5, torch.nan), ids
    if name in ("transformer", "experts"):
        return (torch.randint(0, 50, (rows, 12), generator=generator),)
    shape = {"resnet": (3, 8, 8), "lstm": (6, 16)}.get(name, (16,))
    return (torch.randn(rows, *shape, generator=generator),)


def gradients(net: nn.Module, inputs: tuple[torch.Tensor, ...], device: str) -> list[torch.Tensor]:
    net.to(device)
    net(*(x.to(device) for x in inputs)).square().mean().backward()
    return [p.grad.cpu() for p in net.parameters() if p.grad is not None]


@pytest.mark.parametrize("name", SPECS)
def test_a_network_has_the_outputs_and_gradients_of_the_cpu(name: str, device: str) -> None:
    torch.manual_seed(0)
    net, inputs = SPECS[name].build(), inputs_of(name)
    expected = gradients(copy.deepcopy(net), inputs, "cpu")
    for found, wanted in zip(gradients(net, inputs, device), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5 * float(wanted.abs().max()) + 1e-9)


def test_a_pack_chooses_the_members_of_the_cpu(device: str) -> None:
    found = []
    for where in ("cpu", device):
        torch.manual_seed(0)
        net = SPECS["tabpack"].build().to(where).eval()
        for _ in range(2):  # the second choice has the best weights of the first one
            inputs = [x.to(where) for x in inputs_of("tabpack", 256)]
            errors = net.candidates(*inputs).double() - torch.eye(4, device=where)[inputs[1][:, 0] % 4]
            net.choose_members(torch.einsum("cbo,dbo->cd", errors, errors))
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.mul_(0.9)
        found.append((net(*inputs).cpu(), net.shares.cpu()))
    for of_cpu, of_device in zip(*found, strict=True):
        torch.testing.assert_close(of_device, of_cpu, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("policy", ["all", "sqrt", 2, "named"])
@pytest.mark.parametrize("precision", [None, torch.bfloat16, torch.float16])
def test_recomputed_blocks_draw_the_same_dropout_and_give_the_same_gradients(policy, precision, device):
    spec = ModelSpec(SPECS["transformer"].target, {**SPECS["transformer"].kwargs, "dropout": 0.3})
    inputs, kind = inputs_of("transformer")[0].to(device), device.partition(":")[0]

    def step(policy: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        net = spec.build().to(device)
        apply_activation_checkpoint(net, block_names(net)[:2] if policy == "named" else policy)
        torch.manual_seed(1)
        with torch.autocast(kind, precision, enabled=precision is not None):
            outputs = net(inputs)
        outputs.float().square().mean().backward()
        return [p.grad for p in net.parameters() if p.grad is not None]

    assert all(torch.equal(a, b) for a, b in zip(step("none"), step(policy), strict=True))


@pytest.mark.parametrize("compression", ["bits", "int8", "fp8"])
@pytest.mark.parametrize("offload", ["none", "host", "disk"])
def test_saved_tensors_come_back_as_on_the_cpu(compression: str, offload: str, device: str) -> None:
    if device == "cpu" and offload == "host":
        pytest.skip("everything is on the host")

    def step(where: str, offload: str, compression: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        layers: list[nn.Module] = [nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.GELU()]
        net = nn.Sequential(*layers, nn.Linear(256, 8))
        rows, on = torch.randn(512, 64), torch.device(where)
        net.to(on)
        with saved_tensor_hooks(offload=offload, compression=compression, module=net, device=on):
            output = net(rows.to(on))
        output.square().mean().backward()
        return [p.grad.cpu() for p in net.parameters() if p.grad is not None]

    pairs = [*zip(step(device, offload, compression), step(device, "none", "none"), strict=True)]
    # The batch, ReLU's signs and GELU's input stay exact, so only the last two weights have other gradients.
    changed = [found.shape for found, exact in pairs if not torch.equal(found, exact)]
    assert changed == ([] if compression == "bits" else [(256, 256), (8, 256)])
    assert all(F.cosine_similarity(*map(torch.flatten, pair), dim=0) > 0.99 for pair in pairs)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_takes_the_steps_of_the_cpu(name: str, device: str) -> None:
    def train(where: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 4)).to(where)
        optimizer = make_optimizer(name, net.parameters(), 0.01, 0.1)
        generator = torch.Generator().manual_seed(2)
        for _ in range(5):
            rows = torch.randn(64, 64, generator=generator).to(where)
            optimizer.zero_grad()
            (net(rows) - rows[:, :4]).square().mean().backward()
            optimizer.step()
        return [p.detach().cpu() for p in net.parameters()]

    # 8-bit states round a number near the middle of two codes either way; one code is 1 % of a step of 0.01.
    tolerance = 1e-3 if "8bit" in name else 2e-5
    for found, wanted in zip(train(device), train("cpu"), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", names_of(COMPRESSORS, [name for name in COMPRESSORS if name != "cpsgd"]))
@pytest.mark.parametrize("feedback", [False, True])
def test_a_compressor_gives_what_it_lacks_as_its_error(name: str, feedback: bool, device: str) -> None:
    options = {"gradiveq": {"slice": 64, "components": 4, "samples": 2, "refresh": 3}}
    options |= {"powersgd": {"rank": 2}}
    given = Compression.of({"name": name, **options.get(name, {}), "feedback": feedback})
    compressor = COMPRESSORS[name](SHAPES, 7, given)
    elements = sum(shape.numel() for shape in SHAPES)
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        vector = torch.randn(elements, generator=generator).to(device)
        before = vector.clone()
        sent = compressor.sum(vector, LocalCollective(), step)
        assert sent.total.device == before.device
        if sent.error is not None:
            torch.testing.assert_close(sent.total + sent.error, before, rtol=1e-4, atol=1e-4)


def test_batches_arrive_as_the_columns_dtypes(device: str) -> None:
    columns = [
        {"image": np.arange(24, dtype=np.uint8).reshape(2, 3, 4) + n, "y": np.array([2**40 + n, 1])}
        for n in range(3)
    ]
    config = TrainConfig(shards_uri="", run_uri="", input_columns=("image",), label_columns=("y",))
    batches = list(move_batches(torch.device(device), iter(columns), config))
    for n, batch in enumerate(batches):
        assert batch.inputs[0].device == torch.device(device)
        assert batch.inputs[0].sum().item() == columns[n]["image"].sum()
        assert batch.labels[0][0].item() == 2**40 + n


def test_batches_arrive_in_order_while_the_device_computes(device: str) -> None:
    rows = 1 << (10 if device == "cpu" else 20)
    columns = ({"x": np.full((rows, 8), n, np.float32), "y": np.full(rows, n)} for n in range(20))
    config = TrainConfig(shards_uri="", run_uri="", input_columns=("x",), label_columns=("y",))
    busy, sums = torch.rand(rows >> 8, rows >> 8, device=device), []
    for batch in move_batches(torch.device(device), columns, config):
        busy = busy @ busy  # keeps the stream busy behind the copies
        sums.append(batch.inputs[0].double().sum())
        del batch
    assert [value.item() for value in sums] == [n * rows * 8 for n in range(20)]


@pytest.mark.parametrize("offload", ["host", "disk"])
def test_offload_gives_the_same_bits_and_holds_less(offload: str, device: str) -> None:
    if device == "cpu":
        pytest.skip("everything is on the host")

    def step(offload: str) -> tuple[list[torch.Tensor], int]:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Dropout(0.1)) for _ in range(8)]
        net = nn.Sequential(*layers).to(device)
        x = torch.randn(4096, 512, device=device)
        before = torch.cuda.memory_allocated()
        with saved_tensor_hooks(offload=offload, compression="none", module=net, device=torch.device(device)):
            output = net(x)
        held = torch.cuda.memory_allocated() - before
        output.square().mean().backward()
        return [p.grad for p in net.parameters() if p.grad is not None], held

    plain, held = step("none")
    moved, held_moved = step(offload)
    assert all(torch.equal(a, b) for a, b in zip(plain, moved, strict=True))
    assert held_moved < held / 4
