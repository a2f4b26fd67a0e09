"""The disk store gives bytes back, and its unnamed file ends with the graph; both techniques train."""

import os
import resource
import tempfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import difference
from small_training import columns_of, config_of
from torch import nn

from ringspark.estimators.launch.local import train_here
from ringspark.estimators.training.settings.config import UserObjects
from ringspark.estimators.training.worker import TrainResult
from ringspark.extras.activations import hooks
from ringspark.extras.activations.hooks import saved_tensor_hooks
from ringspark.extras.activations.offload import Copies, HostStore, make_store
from ringspark.models import ModelSpec

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def hooks_of(module: nn.Module | None = None, offload: str = "disk") -> AbstractContextManager[None]:
    return saved_tensor_hooks(offload=offload, compression="none", module=module or nn.Identity(), device=CPU)


def open_files(folder: Path) -> list[int]:
    """Returns the sizes of open files in `folder`, including deleted ones."""
    sizes = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{fd}").startswith(f"{folder}/"):
                sizes.append(os.fstat(int(fd)).st_size)
        except OSError:  # the descriptor of listdir itself
            continue
    return sizes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_disk_gives_every_dtype_back_to_the_bit(dtype: torch.dtype) -> None:
    store = make_store("disk", CPU)
    vectors = [torch.randn(count).mul(100).to(dtype) for count in (1, 4097, 100_000)]
    restores = [store.put(vector) for vector in vectors]
    for vector, restore in [*zip(vectors, restores, strict=True)][::-1]:
        assert torch.equal(restore(), vector)


def test_nan_payloads_survive_the_disk() -> None:
    bits = torch.tensor([0x7FC00001, 0x7F800001, -1, 0x7F800000], dtype=torch.int32).repeat(2000)
    store = make_store("disk", CPU)
    assert torch.equal(store.put(bits.view(torch.float32))().view(torch.int32), bits)


def test_file_has_no_name_and_ends_with_the_backward_pass(folder: Path) -> None:
    net = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh())
    for _ in range(3):
        x = torch.randn(64, 256)
        with hooks_of(net):
            output = net(x)
        # The input and two outputs of tanh; the first output is also the second input, written once.
        assert open_files(folder) == [3 * 64 * 256 * 4]
        assert not list(folder.iterdir())
        output.sum().backward()
        assert not open_files(folder)


def test_file_ends_with_an_exception_in_either_pass(folder: Path) -> None:
    def fail(gradient: torch.Tensor) -> None:
        raise KeyError("broken")

    net = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256))

    def step(forward_fails: bool) -> None:
        with hooks_of(net):
            output = net(torch.randn(64, 256))
            if forward_fails:
                raise KeyError("broken")
        output.register_hook(fail)
        assert open_files(folder)
        output.sum().backward()

    for forward_fails in (True, False):
        with pytest.raises(KeyError, match="broken"):
            step(forward_fails)
        assert not open_files(folder)


def test_views_of_one_projection_travel_once(folder: Path) -> None:
    x = torch.randn(64, 256, requires_grad=True)
    with hooks_of():
        first, second = (x * 2).chunk(2, dim=1)
        y = first * second
    assert open_files(folder) == [64 * 256 * 4]
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(gradient, 4 * torch.cat([x[:, 128:], x[:, :128]], dim=1))


@pytest.fixture
def limited_files() -> Iterator[None]:
    """Limits files to 1 MiB; the kernel then refuses writes, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.usefixtures("limited_files")
def test_full_disk_is_one_clear_sentence(folder: Path) -> None:
    x = torch.randn(2**18 - 1024, requires_grad=True)
    told = rf"activationOffload 'disk' could not write .*{folder}.* TMPDIR .*"
    with pytest.raises(OSError, match=told), hooks_of():
        (x * 1).sin().sin().sin()


def test_host_is_refused_where_everything_is_on_the_host() -> None:
    with pytest.raises(ValueError, match="set activationOffload='disk'"), hooks_of(offload="host"):
        pass


def test_meta_tensors_leave_nothing_behind() -> None:
    store = make_store("host", torch.device("meta"))
    values = torch.empty(5000, dtype=torch.bfloat16, device="meta")
    restored = store.put(values)()
    assert (restored.shape, restored.dtype, restored.device) == (values.shape, values.dtype, values.device)


class LateCopies(Copies):
    """A stream that runs each copy as late as allowed: when a wait needs it, after all copies before it."""

    def __init__(self) -> None:
        super().__init__()
        self.allocated: list[int] = []
        self.started: list[tuple[weakref.ref[torch.Tensor], ...]] = []
        self.done = 0
        self.order: list[str] = []

    def allocate(self, size: int) -> torch.Tensor:
        self.allocated.append(size)
        return super().allocate(size)

    def start(self, target: torch.Tensor, source: torch.Tensor) -> int:
        self.started.append((weakref.ref(target), weakref.ref(source)))
        self.order.append(f"start {len(self.started)}")
        return len(self.started)

    @torch.no_grad()
    def wait(self, copy: int, values: torch.Tensor) -> None:
        self.order.append(f"wait {copy}")
        while self.done < copy:
            target, source = (tensor() for tensor in self.started[self.done])
            assert None not in (target, source), "freed without waiting for the copy"
            target.copy_(source)
            self.done += 1


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> LateCopies:
    """Returns the copies of offload "host", which runs on the CPU in this test."""
    copies = LateCopies()
    stores = {"host": HostStore}
    monkeypatch.setattr(hooks, "make_store", lambda name, _: stores[name](copies) if name in stores else None)
    return copies


@pytest.mark.parametrize("compression", ["none", "bits", "int8", "fp8"])
def test_late_copies_change_no_gradient_and_reuse_the_buffers(
    run: Any, network: str, compression: str, late: LateCopies
) -> None:
    expected = run(network, compression=compression)
    for _ in range(3):
        found = run(network, compression=compression, offload="host")
        assert found.equals(expected)
        assert found.left == sum(late.allocated)  # only the buffers
    # A tensor that two distant layers need comes back twice.
    assert len(late.started) == late.done >= 3 * 2 * len(late.allocated) > 0


def test_backward_pass_starts_one_copy_ahead(late: LateCopies) -> None:
    net = nn.Sequential(*(nn.Tanh() for _ in range(4)), nn.Linear(64, 1))
    with hooks_of(net, "host"):
        output = net(torch.randn(64, 64, requires_grad=True))
    # Copies 1 to 4 leave, and the device keeps at most two tensors until they are in host memory.
    forward = ["start 1", "start 2", "start 3", "wait 1", "start 4", "wait 2", "wait 3", "wait 4"]
    assert late.order == forward
    assert late.allocated == [64 * 64 * 4] * 4
    output.sum().backward()
    # The linear layer and the last Tanh need the same tensor.
    backward = ["start 5", "wait 5", "start 6", "wait 6", "start 7", "wait 7", "start 8", "wait 8"]
    assert late.order == forward + backward


def test_released_graph_waits_for_the_copy_ahead() -> None:
    copies = LateCopies()
    store = HostStore(copies)
    first, second = (store.put(torch.full((2048,), value)) for value in (1.0, 2.0))
    store.end_forward()
    assert second().eq(2).all()
    del first, second
    assert copies.done == len(copies.started) == 4
    assert HostStore(copies).put(torch.full((2048,), 3.0))().eq(3).all()
    assert copies.allocated == [8192, 8192]


def test_tensor_changed_while_it_leaves_is_refused_as_by_autograd() -> None:
    values = torch.ones(2048)
    restore = HostStore(LateCopies()).put(values)
    values.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        restore()


SPEC = ModelSpec("mlp", {"in_features": 16, "hidden": [128, 128], "out_features": 1, "dropout": 0.2})
NETWORK = SPEC.build()


@pytest.fixture
def train(make_shards: Any, tmp_path: Path) -> Callable[..., TrainResult]:
    manifest = make_shards(columns_of(600, 16))

    def train(**changes: Any) -> TrainResult:
        run = tmp_path / "-".join(map(str, changes.values()))
        config = config_of(manifest, run, model=SPEC, batch_size=100, epochs=4, **changes)
        return train_here(config, UserObjects())

    return train


@pytest.mark.parametrize(("offload", "compression"), [("disk", "none"), ("none", "bits"), ("disk", "bits")])
def test_exact_techniques_train_the_same_weights(train: Any, offload: str, compression: str) -> None:
    plain = train(gradient_accumulation=3)
    packed = train(gradient_accumulation=3, activation_offload=offload, activation_compression=compression)
    assert packed.history[-1].train_loss == plain.history[-1].train_loss
    assert difference(packed, plain, NETWORK) == 0


@pytest.mark.parametrize("compression", ["int8", "fp8"])
def test_eight_bits_reach_the_training_and_hardly_change_it(train: Any, compression: str) -> None:
    plain, packed = train(), train(activation_compression=compression)
    assert difference(packed, plain, NETWORK) > 0
    assert packed.history[-1].train_loss == pytest.approx(plain.history[-1].train_loss, rel=0.05)


def test_offload_reaches_the_training(train: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(OSError, match=r"activationOffload 'disk' could not write .* No such file"):
        train(activation_offload="disk")
