"""Keeps a model's weights readable after the folder that they were saved in is removed.

`PipelineModel.load(p).write().overwrite().save(p)` removes `p` first. On a local disk a loaded model keeps
its weights open, and an open file stays readable. On other stores, the model then raises a ValueError.
"""

from __future__ import annotations

import os
import shutil
import weakref

from safetensors.torch import load
from torch import Tensor, nn

from ringspark.estimators.training.checkpoint.folders import (
    checkpoints_uri,
    copy_checkpoint,
    is_committed,
    list_steps,
    step_uri,
)
from ringspark.estimators.training.checkpoint.tensor_file import BLOCK_BYTES
from ringspark.estimators.training.checkpoint.weights import (
    ADAPTER,
    COMMIT,
    WEIGHTS,
    CheckpointInfo,
    map_checkpoint,
    map_file,
    parse_info,
    read_adapter,
    read_info,
    replacing,
)
from ringspark.pipelines import storage


class HeldWeights:
    """The checkpoint of one model in folder `uri`; copies of the model share it."""

    def __init__(self, uri: str, commit: bytes | None = None) -> None:
        self.uri = uri
        self._commit = commit
        self._descriptor: int | None = None
        self._adapter: bytes | None = None
        # The step of the training state, which a continued run replaces; None without one.
        self._step: int | None = None
        self.is_saved = False

    def hold(self) -> None:
        """Reads the checkpoint's record; on a local disk also opens the file of the tensors."""
        info = read_info(self.uri)
        try:
            size = storage.size(storage.join(self.uri, WEIGHTS))
        except FileNotFoundError:
            raise ValueError(f"{self.uri} holds no {WEIGHTS}; save the model again") from None
        if size != info.num_bytes:
            raise ValueError(
                f"{self.uri}/{WEIGHTS} has {size} bytes, {info.num_bytes} were written; save the model again"
            )
        self._commit = storage.read_bytes(storage.join(self.uri, COMMIT))
        self._adapter = self._read_adapter()
        root = self._states_uri
        self._step = max((step for step in list_steps(root) if is_committed(root, step)), default=None)
        if storage.is_local(self.uri):
            storage.check_inside(self.uri, WEIGHTS)
            self._descriptor = os.open(os.path.join(self.uri, WEIGHTS), os.O_RDONLY | os.O_CLOEXEC)
            weakref.finalize(self, os.close, self._descriptor)

    def info(self) -> CheckpointInfo:
        """Returns the checkpoint's record; raises ValueError if the folder holds other weights or none."""
        if not storage.exists(storage.join(self.uri, COMMIT)):
            raise ValueError(
                f"this model's weights were in {self.uri}, which is gone; keep the run folder of a fit until "
                "the model is saved, and save a loaded pipeline to another folder than its own"
            )
        info = read_info(self.uri)
        if self._commit is not None and parse_info(self._commit, self.uri) != info:
            raise ValueError(f"{self.uri} now has the weights of another model; load the model again")
        return info

    def map_into(self, module: nn.Module) -> None:
        """Maps the checkpoint's tensors into the module, from the file that `hold` opened or the folder."""
        if self._descriptor is None:
            map_checkpoint(self.uri, module, expected_id=self.info().checkpoint_id)
        else:
            map_file(f"/dev/fd/{self._descriptor}", module, self.uri)

    def adapter(self) -> dict[str, Tensor]:
        """Returns the adapter's tensors, also after the folder was removed."""
        if self._adapter is not None:
            return load(self._adapter)
        self.info()
        return read_adapter(self.uri)

    def training_state(self) -> str | None:
        """Returns the folder of the training's last checkpoint, which `keepTrainingState` keeps, or None."""
        root, step = self._states_uri, self._step
        return step_uri(root, step) if step is not None and is_committed(root, step) else None

    @property
    def _states_uri(self) -> str:
        # A run's folder and a saved stage both hold the checkpoints next to the weights.
        return checkpoints_uri(self.uri.rpartition("/")[0])

    def check(self) -> None:
        """Raises ValueError if the folder has lost its checkpoint and no file was kept open."""
        if self._descriptor is None:
            self.info()

    def copy_to(self, target: str) -> None:
        """Copies the checkpoint into the folder `target`; writes the file that makes it complete last."""
        self.check()
        commit = self._commit or storage.read_bytes(storage.join(self.uri, COMMIT))
        with replacing(target, WEIGHTS) as writer:
            if self._descriptor is not None:
                position = 0
                while block := os.pread(self._descriptor, BLOCK_BYTES, position):
                    writer.write(block)
                    position += len(block)
            else:
                with storage.open_file(storage.join(self.uri, WEIGHTS), "rb") as reader:
                    shutil.copyfileobj(reader, writer, BLOCK_BYTES)
        if adapter := self._adapter or self._read_adapter():
            storage.write_atomic(storage.join(target, ADAPTER), adapter)
        if self._step is not None and self.training_state() is not None:
            copy_checkpoint(self._states_uri, checkpoints_uri(target.rpartition("/")[0]), self._step)
        self.is_saved = True
        storage.write_atomic(storage.join(target, COMMIT), commit)

    def _read_adapter(self) -> bytes | None:
        uri = storage.join(self.uri, ADAPTER)
        return storage.read_bytes(uri) if storage.exists(uri) else None

    def __reduce__(self) -> tuple[type[HeldWeights], tuple[str, bytes | None]]:
        # An open file cannot be pickled; another process needs the folder, with these weights still in it.
        return HeldWeights, (self.uri, self._commit)
