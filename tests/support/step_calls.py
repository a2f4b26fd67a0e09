"""Operations of one real training step, and its calls that wait for a device."""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode

from ringspark.estimators.training.callbacks import Callback, TrainingState

# Each call returns a number to Python or moves a tensor, so it would wait for a GPU.
WAITING = ("item", "tolist", "cpu", "__bool__", "__int__", "__float__", "nonzero")


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class Waits(TorchFunctionMode):
    """Records Python calls that wait for a device; on a CPU some of them are not operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = (resolve_name(func) or getattr(func, "__name__", "")).rpartition(".")[2]
        if name in WAITING:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


class StepCalls(Callback):
    """Writes the calls of step 5 on rank 0."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._modes: tuple[ExitStack, Operations, Waits] | None = None

    def on_step_end(self, state: TrainingState) -> None:
        if state.step == 4:
            stack = ExitStack()
            self._modes = stack, stack.enter_context(Operations()), stack.enter_context(Waits())
        elif self._modes is not None:
            stack, operations, waits = self._modes
            self._modes = None
            stack.close()
            if state.rank == 0:
                self._path.write_text(json.dumps([operations.names, waits.names]))


def calls_of(path: Path) -> tuple[list[str], list[str]]:
    operations, waits = json.loads(path.read_text())
    return operations, waits


def waiting_operations(operations: list[str]) -> list[str]:
    """Returns the operations that copy a number or a tensor to or from a device."""
    return [name for name in operations if name.startswith(("aten._local_scalar_dense", "aten._to_copy"))]


def operations_of(step: Any) -> list[str]:
    with Operations() as operations:
        step()
    return operations.names
