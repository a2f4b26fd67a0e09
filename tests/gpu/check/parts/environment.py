"""Part "environment": the device, its driver and the packages, and whether the device computes at all."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sysconfig
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from check.part import Part, SkippedError, Value

_PACKAGES = (
    *("numpy", "pyarrow", "safetensors", "psutil", "fsspec", "cloudpickle", "torchmetrics", "triton"),
    *("nvidia-ml-py", "pytest", "hypothesis"),
)
_VARIABLES = ("CUDA_", "NVIDIA_", "PYTORCH_", "TORCH_", "TORCHINDUCTOR_", "TRITON_", "NCCL_", "CUBLAS_")


class Environment(Part):
    """Each fact is a case of its own, because on a strange machine any of them may fail."""

    columns = ("value",)
    note = "What the other parts ran on. The last rows compute on the device and compare with the CPU."

    def cases(self) -> Sequence[str]:
        return list(self._facts)

    def measure(self, case: str) -> Sequence[Value]:
        return [self._facts[case]()]

    @property
    def _facts(self) -> dict[str, Callable[[], str]]:
        return {
            "Python": lambda: f"{platform.python_version()} on {platform.platform()}",
            "torch": _torch,
            "device": self._device,
            "driver": _driver,
            "memory": self._memory,
            "fp32 products": _products,
            "compilers": _compilers,
            "packages": _packages,
            "variables": _variables,
            "products on the device": self._multiply,
            "pinned copies on a second stream": self._copy,
            "random numbers": self._draw,
        }

    def _device(self) -> str:
        import torch

        if not self.setup.on_gpu:
            reason = "" if torch.cuda.is_available() else f"; {_why_no_cuda()}"
            if reason and (gpus := _nvidia_smi()):
                raise RuntimeError(f"nvidia-smi lists {gpus[0]}, but torch cannot use it{reason}")
            return f"CPU, {os.cpu_count()} cores{reason}"
        known = torch.cuda.get_device_properties(self.setup.device)
        return (
            f"{known.name}, compute capability {known.major}.{known.minor}, "
            f"{known.multi_processor_count} multiprocessors, first of {torch.cuda.device_count()}"
        )

    def _memory(self) -> str:
        import torch

        if not self.setup.on_gpu:
            raise SkippedError("the CPU has no device memory")
        free, total = torch.cuda.mem_get_info(self.setup.device)
        return f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"

    def _multiply(self) -> str:
        import torch

        values = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
        found = (values.to(self.setup.device) @ values.to(self.setup.device)).cpu()
        error = float((found - values @ values).abs().max() / (values @ values).abs().max())
        assert error < 1e-2, f"a product is off by {error:.2g} of its largest value"
        return f"largest difference {error:.1e} of the largest value"

    def _copy(self) -> str:
        import torch

        if not self.setup.on_gpu:
            raise SkippedError("the CPU has no streams")
        stream: Any = torch.cuda.Stream(self.setup.torch_device)  # type: ignore[no-untyped-call]
        values = torch.arange(1_000_000).pin_memory()
        with torch.cuda.stream(stream):
            moved = values.to(self.setup.device, non_blocking=True)
        torch.cuda.current_stream(self.setup.device).wait_stream(stream)
        assert torch.equal(moved.cpu(), values)
        return "equal"

    def _draw(self) -> str:
        import torch

        device = torch.device(self.setup.device)
        with torch.random.fork_rng(devices=[device] if self.setup.on_gpu else []):
            torch.manual_seed(3)
            first = torch.rand(1000, device=device)
            torch.manual_seed(3)
            assert torch.equal(first, torch.rand(1000, device=device))
        return "equal after the same seed"


def _torch() -> str:
    import torch

    parts = [torch.__version__, f"CUDA {torch.version.cuda or 'none'}"]
    cudnn: Any = torch.backends.cudnn
    if cudnn.is_available():
        parts.append(f"cuDNN {cudnn.version()}")
    if torch.distributed.is_available() and torch.distributed.is_nccl_available():
        parts.append("NCCL")
    return ", ".join(parts)


def _why_no_cuda() -> str:
    import torch

    if torch.version.cuda is None:
        return "this torch was built without CUDA"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        return str(error).splitlines()[0]
    return "torch finds no CUDA device"


def _nvidia_smi() -> list[str]:
    """Returns a line per GPU; none if there is no nvidia-smi, or it fails."""
    if shutil.which("nvidia-smi") is None:
        return []
    names = "name,driver_version,memory.total,mig.mode.current"
    command = ["nvidia-smi", f"--query-gpu={names}", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    return done.stdout.strip().splitlines() if done.returncode == 0 else []


def _driver() -> str:
    if not (found := _nvidia_smi()):
        raise SkippedError("nvidia-smi is missing, or lists no GPU")
    return "; ".join(found)


def _products() -> str:
    import torch

    precision = torch.get_float32_matmul_precision()
    return f"{precision} precision, cuDNN with TF32: {torch.backends.cudnn.allow_tf32}"


def _compilers() -> str:
    found = [path for name in ("cc", "g++", "nvcc") if (path := shutil.which(name))]
    header = Path(sysconfig.get_path("include")) / "Python.h"
    return ", ".join([*found, "Python.h" if header.exists() else "no Python.h"])


def _packages() -> str:
    found = []
    for name in _PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"no {name}")
    return ", ".join(found)


def _variables() -> str:
    found = {k: v for k, v in sorted(os.environ.items()) if k.startswith(_VARIABLES)}
    return ", ".join(f"{name}={value[:80]}" for name, value in found.items()) or "none of CUDA, torch or NCCL"
