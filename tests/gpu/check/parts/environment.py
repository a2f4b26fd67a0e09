"""Part "environment": the device, its driver and the packages, and whether the device computes at all."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from check.part import Part, Setup, SkippedError, Value

with suppress(ImportError):  # then the facts about torch fail, and the others do not
    import torch

_PACKAGES = (
    *("numpy", "pyarrow", "safetensors", "psutil", "fsspec", "cloudpickle", "torchmetrics", "triton"),
    *("nvidia-ml-py", "pytest", "hypothesis"),
)
_VARIABLES = ("CUDA_", "NVIDIA_", "PYTORCH_", "TORCH_", "TORCHINDUCTOR_", "TRITON_", "NCCL_", "CUBLAS_")


def _torch(setup: Setup) -> str:
    import torch

    cudnn, distributed = torch.backends.cudnn, torch.distributed
    parts = [torch.__version__, f"CUDA {torch.version.cuda or 'none'}"]
    parts += [f"cuDNN {cudnn.version()}"] * cudnn.is_available()
    parts += ["NCCL"] * (distributed.is_available() and distributed.is_nccl_available())
    return ", ".join(parts)


def _device(setup: Setup) -> str:
    if not setup.on_gpu:
        reason = "" if torch.cuda.is_available() else f"; {_why_no_cuda()}"
        if reason and (gpus := _nvidia_smi()):
            raise RuntimeError(f"nvidia-smi lists {gpus[0]}, but torch cannot use it{reason}")
        return f"CPU, {os.cpu_count()} cores{reason}"
    known = torch.cuda.get_device_properties(setup.device)
    return (
        f"{known.name}, compute capability {known.major}.{known.minor}, "
        f"{known.multi_processor_count} multiprocessors, first of {torch.cuda.device_count()}"
    )


def _why_no_cuda() -> str:
    if torch.version.cuda is None:
        return "this torch was built without CUDA"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).splitlines()[0]
    return "torch finds no CUDA device"


def _nvidia_smi() -> list[str]:
    """Returns a line per GPU; none if there is no nvidia-smi, or it fails."""
    names = "name,driver_version,memory.total,mig.mode.current"
    command = ["nvidia-smi", f"--query-gpu={names}", "--format=csv,noheader"]
    with suppress(FileNotFoundError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
        return done.stdout.strip().splitlines() if done.returncode == 0 else []
    return []


def _driver(setup: Setup) -> str:
    if not (found := _nvidia_smi()):
        raise SkippedError("nvidia-smi is missing, or lists no GPU")
    return "; ".join(found)


def _memory(setup: Setup) -> str:
    if not setup.on_gpu:
        raise SkippedError("the CPU has no device memory")
    free, total = torch.cuda.mem_get_info(setup.device)
    return f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"


def _products(setup: Setup) -> str:
    precision = torch.get_float32_matmul_precision()
    return f"{precision} precision, cuDNN with TF32: {torch.backends.cudnn.allow_tf32}"


def _compilers(setup: Setup) -> str:
    found = [path for name in ("cc", "g++", "nvcc") if (path := shutil.which(name))]
    header = Path(sysconfig.get_path("include")) / "Python.h"
    return ", ".join([*found, "Python.h" if header.exists() else "no Python.h"])


def _package(name: str) -> str:
    try:
        return f"{name} {version(name)}"
    except PackageNotFoundError:
        return f"no {name}"


def _variables(setup: Setup) -> str:
    found = [f"{k}={v[:80]}" for k, v in sorted(os.environ.items()) if k.startswith(_VARIABLES)]
    return ", ".join(found) or "none of CUDA, torch or NCCL"


def _multiply(setup: Setup) -> str:
    values = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    found = (values.to(setup.device) @ values.to(setup.device)).cpu()
    error = float((found - values @ values).abs().max() / (values @ values).abs().max())
    assert error < 1e-2, f"a product is off by {error:.2g} of its largest value"
    return f"largest difference {error:.1e} of the largest value"


def _copy(setup: Setup) -> str:
    if not setup.on_gpu:
        raise SkippedError("the CPU has no streams")
    stream = torch.cuda.Stream(setup.torch_device)
    values = torch.arange(1_000_000).pin_memory()
    with torch.cuda.stream(stream):
        moved = values.to(setup.device, non_blocking=True)
    torch.cuda.current_stream(setup.device).wait_stream(stream)
    assert torch.equal(moved.cpu(), values)
    return "equal"


def _draw(setup: Setup) -> str:
    def numbers() -> torch.Tensor:
        return torch.rand(1000, device=setup.device, generator=torch.Generator(setup.device).manual_seed(3))

    assert torch.equal(numbers(), numbers())
    return "equal after the same seed"


_FACTS = {
    "Python": lambda setup: f"{platform.python_version()} on {platform.platform()}",
    "torch": _torch,
    "device": _device,
    "driver": _driver,
    "memory": _memory,
    "fp32 products": _products,
    "compilers": _compilers,
    "packages": lambda setup: ", ".join(map(_package, _PACKAGES)),
    "variables": _variables,
    "products on the device": _multiply,
    "pinned copies on a second stream": _copy,
    "random numbers": _draw,
}


class Environment(Part):
    """Each fact is a case of its own, because on a strange machine any of them may fail."""

    columns = ("value",)
    note = "What the other parts ran on. The last rows compute on the device and compare with the CPU."

    def cases(self) -> Sequence[str]:
        return list(_FACTS)

    def measure(self, case: str) -> Sequence[Value]:
        return [_FACTS[case](self.setup)]
