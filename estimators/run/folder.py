"""Manages the folder of one training: its start, resumes, end and removal.

After a failure, a folder that the user named is kept if it holds a checkpoint. All other folders are removed.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from ringspark.estimators import run_layout
from ringspark.estimators.failures import TrainingCancelledError, WorkerError
from ringspark.estimators.launch.owner import read_owner, write_owner
from ringspark.estimators.options.sync import Sync
from ringspark.estimators.run.identity import FORMAT_VERSION, list_differences, split_changes
from ringspark.estimators.run.store_clock import read_store_clock
from ringspark.estimators.techniques import techniques_of
from ringspark.estimators.training.checkpoint.folders import (
    checkpoints_uri,
    is_committed,
    keep_newest,
    list_steps,
    step_uri,
)
from ringspark.estimators.training.checkpoint.reading import read_record
from ringspark.estimators.training.history import SettingChange
from ringspark.estimators.training.settings.config import TrainConfig
from ringspark.pipelines import storage
from ringspark.pipelines.folder_removal import FILES, FOLDER_PREFIX, discard, remove_folder
from ringspark.pipelines.typed_json import OtherFormatError, fit, parse, record, versioned

_logger = logging.getLogger(__name__)

# Every worker writes a heartbeat every few seconds, so after this time it is dead.
_DEAD_SECONDS = 60.0


class RunRefusedError(ValueError):
    """The run in a folder cannot be resumed by this fit."""


def check_run_uri(run_uri: str | None, resume: bool) -> None:
    """Raises ValueError unless the folder is new or empty, or holds a run and `resume` is set."""
    if run_uri is None:
        if resume:
            raise ValueError("resume=True continues the run of a folder; set runUri to that folder")
        return
    storage.check_writable(run_uri)
    uri = storage.normalize(run_uri)
    names = storage.list_names(uri)
    begun = run_layout.OWNER in names or run_layout.IDENTITY in names
    # A run without an identity has trained nothing, so `RunFolder.given` removes the folder's content.
    if begun and run_layout.IDENTITY not in names and (others := run_layout.foreign_names(names)):
        raise ValueError(
            f"runUri {uri!r} holds {others[0]!r}, which no training writes; give another folder, because "
            "this folder may belong to a search"
        )
    if begun and not resume:
        raise ValueError(
            f"runUri {uri!r} holds a run; set resume=True to continue it, or give another folder"
        )
    if names and not begun:
        raise ValueError(
            f"runUri must be a new or empty folder or one with a run, and {uri!r} holds {names[0]!r}; give "
            "another folder"
        )


def remove_old_run(uri: str, resume: bool | None) -> None:
    """Removes the run in the folder of a new run, unless `resume` is set.

    If `resume` is None (unset), refuses an unfinished run that can be resumed or may be training now.
    """
    names = storage.list_names(uri)
    # `check_run_uri` refuses a folder with other content.
    if resume or not {run_layout.IDENTITY, run_layout.OWNER} & set(names):
        return
    if others := run_layout.foreign_names(names):
        raise ValueError(
            f"{uri} holds {others[0]!r}, which belongs to no run, so the old run in this folder is not "
            "removed; move that file elsewhere, or name another folder"
        )
    folder = RunFolder(uri, is_given=True)
    is_unfinished = resume is None and folder.result() is None
    if is_unfinished and folder.has_checkpoint():
        raise ValueError(
            f"{uri} holds an unfinished run; give --resume to continue it, --no-resume to start a new run, "
            "or name another folder"
        )
    if is_unfinished and (seconds := _seconds_since_heartbeat(uri)) is not None:
        raise ValueError(
            f"a worker of the run in {uri} sent a heartbeat {seconds:.0f} s ago, so the run may be training; "
            f"if its driver has ended, start again in {_DEAD_SECONDS:.0f} s, or give --no-resume to remove "
            "the run; else name another folder"
        )
    remove_folder(uri, run_layout.PATHS, run_layout.find_mark(names))


def _seconds_since_heartbeat(uri: str) -> float | None:
    with suppress(FileNotFoundError):
        changed = storage.newest_change(storage.join(uri, run_layout.HEARTBEAT))
        if changed is not None:
            seconds = max(0.0, read_store_clock(uri) - changed)
            return seconds if seconds < _DEAD_SECONDS else None
    return None


@dataclass(frozen=True, kw_only=True)
class Begun:
    """The content of `run.json`."""

    identity: dict[str, Any]
    format_version: int = FORMAT_VERSION


class RunFolder:
    """The folder of one training, in use by one fit.

    `is_given`: whether the user named the folder; only such a training can be resumed. `token` identifies
    this driver; the workers of an earlier driver end when they read this token in the folder.
    """

    def __init__(self, uri: str, *, is_given: bool) -> None:
        self.uri = storage.normalize(uri)
        self.token = uuid.uuid4().hex
        self.is_given = is_given
        # False while the content of an earlier run must survive a fit that is refused.
        self._is_mine = True
        self._was_there = False

    @classmethod
    def new(cls, root: str) -> RunFolder:
        return cls(storage.join(root, f"run-{uuid.uuid4().hex[:12]}"), is_given=False)

    @classmethod
    def given(cls, run_uri: str, resume: bool) -> RunFolder:
        """Returns the folder that the user named, and takes it over from any other driver."""
        check_run_uri(run_uri, resume)
        folder = cls(run_uri, is_given=True)
        folder._was_there = storage.exists(folder.uri)
        folder._is_mine = folder.identity() is None
        if folder._is_mine:
            # Nothing was trained here, so files of a dead driver are useless.
            for name in storage.list_names(folder.uri):
                remove_folder(storage.join(folder.uri, name), run_layout.PARTS)
            write_owner(folder.uri, folder.token, 0)
        return folder

    def identity(self) -> Begun | None:
        """Returns the content of `run.json`, or None; raises RunRefusedError if it cannot be read."""
        uri = storage.join(self.uri, run_layout.IDENTITY)
        try:
            return record(Begun, versioned(storage.read_bytes(uri), FORMAT_VERSION))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OtherFormatError as error:
            raise RunRefusedError(
                f"the run in {self.uri!r} cannot be resumed: {error}, or give another folder"
            ) from None
        except ValueError as error:
            raise RunRefusedError(
                f"the run in {self.uri!r} cannot be resumed: {run_layout.IDENTITY} is damaged ({error}); "
                "give another folder"
            ) from None

    def begin(self, config: TrainConfig, identity: dict[str, Any]) -> list[SettingChange]:
        """Takes over an unfinished run, or a finished one that gets more epochs, and writes `run.json`.

        Returns the settings that this start changes, after recording them. Refuses a run with another
        `identity` in any other setting.
        """
        known = self.identity()
        found: dict[str, tuple[Any, Any]] = {}
        if known is not None:
            found, expected = split_changes(known.identity, identity)
            if changed := list_differences(expected, identity):
                raise self.refusal(changed)
        if self.result() is not None:
            if not found:
                return []
            self._check_reopens(found)
        changes = [self._change_of(identity, name, *change) for name, change in found.items()]
        self._is_mine = True
        write_owner(self.uri, self.token, 0)
        storage.write_atomic(storage.join(self.uri, run_layout.CONFIG), config.to_json().encode())
        if changes:
            # A killed driver may have recorded changes before any step used them.
            untrained = [c for c in self.changes() if c.step >= changes[0].step and c.setting in found]
            first = {c.setting: c.before for c in reversed(untrained)}
            changes = [replace(c, before=first.get(c.setting, c.before)) for c in changes]
            changes = [c for c in changes if c.before != c.now]
            kept = [c for c in self.changes() if c not in untrained]
            data = json.dumps([asdict(change) for change in (*kept, *changes)], indent=1).encode()
            storage.write_atomic(storage.join(self.uri, run_layout.CHANGES), data)
        if known is None or found:
            data = json.dumps(asdict(Begun(identity=identity)), indent=1).encode()
            storage.write_atomic(storage.join(self.uri, run_layout.IDENTITY), data)
        storage.remove(storage.join(self.uri, run_layout.RESULT))
        return changes

    def changes(self) -> tuple[SettingChange, ...]:
        """Returns the settings that resumes of this run changed, in order."""
        uri = storage.join(self.uri, run_layout.CHANGES)
        if not storage.exists(uri):
            return ()
        return tuple(fit(list[SettingChange], parse(storage.read_bytes(uri)), run_layout.CHANGES))

    def _check_reopens(self, found: Mapping[str, tuple[Any, Any]]) -> None:
        """Refuses to continue a finished run unless it gets more epochs and kept its training state."""
        before, now = found.get("epochs", (0, 0))
        if now <= before:
            changed = [f"{name}: {change[0]} -> {change[1]}" for name, change in found.items()]
            raise RunRefusedError(
                f"the run in {self.uri!r} has finished, and these changed: {'; '.join(changed)}; raise "
                "epochs to train further, set them back to get its model, or give another folder"
            )
        if not self.has_checkpoint():
            raise RunRefusedError(
                f"the run in {self.uri!r} has finished without keepTrainingState=True, so it cannot get more "
                "epochs; set initialModel to its model, and runUri to another folder"
            )

    def _change_of(self, identity: dict[str, Any], name: str, before: Any, now: Any) -> SettingChange:
        root, step, epoch = checkpoints_uri(self.uri), 0, 1
        for step in reversed(list_steps(root)):
            with suppress(ValueError, FileNotFoundError):
                epoch = read_record(step_uri(root, step)).position.finished_epochs + 1
                break
        else:
            step = 0
        note, settings = "", identity["settings"]
        schedule = settings["lrSchedule function"] or settings["lrSchedule"]
        if name == "epochs" and schedule != "constant":
            note = f"lrSchedule {schedule!r} is planned again over all epochs"
        elif name == "sync":
            before, now = repr(Sync.of(before)), repr(Sync.of(now))
        elif name == "precision" and "fp16" in (before, now):
            note = "the loss scale starts new" if now == "fp16" else "the loss scale ends"
        return SettingChange(setting=name, before=before, now=now, epoch=epoch, step=step + 1, note=note)

    def last_config(self) -> TrainConfig | None:
        with suppress(OSError, ValueError):
            text = storage.read_bytes(storage.join(self.uri, run_layout.CONFIG)).decode()
            return TrainConfig.from_json(text)
        return None

    def refusal(self, changed: list[str]) -> RunRefusedError:
        return RunRefusedError(
            f"the run in {self.uri!r} cannot be resumed, because these changed: {'; '.join(changed)}; "
            "set them back, or give another folder"
        )

    def has_history(self) -> bool:
        with suppress(OSError):
            return storage.exists(storage.join(self.uri, run_layout.HISTORY))
        return False

    def result(self) -> str | None:
        """Returns the finished training as JSON; None if it has not finished."""
        try:
            return storage.read_bytes(storage.join(self.uri, run_layout.RESULT)).decode()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def finish(self, result: str, config: TrainConfig) -> None:
        """Marks the training as finished. The files that `clean` removes are not needed from now on."""
        storage.write_atomic(storage.join(self.uri, run_layout.RESULT), result.encode())
        for technique in techniques_of(config):
            technique.finish(self.uri)

    def clean(self, *, keeps_checkpoints: bool = False, keeps_all: bool = False) -> None:
        """Removes files of a finished training: checkpoints and shards, but not the shards' manifest.

        `keeps_checkpoints` keeps the newest checkpoint and the shards, so that more epochs can follow;
        `keeps_all` keeps the earlier checkpoints too.
        """
        states = storage.join(self.uri, run_layout.SHARD_STATES)
        if not storage.exists(states):  # written before the training, and removed last
            return
        root = checkpoints_uri(self.uri)
        if not keeps_checkpoints:
            self._discard(run_layout.CHECKPOINTS)
        elif (steps := list_steps(root)) and not keeps_all:
            keep_newest(root, steps[-1], 1)
        for name in (run_layout.HEARTBEAT, run_layout.FIRST_WEIGHTS):
            self._discard(name)
        # A killed `write_atomic` leaves its temporary file.
        for name in self._own_names():
            if name.startswith((".", f"{run_layout.SHARDS}-")):
                self._discard(name)
        shards = storage.join(self.uri, run_layout.SHARDS)
        if self.is_given and not keeps_checkpoints:
            for name in storage.list_names(shards):
                if name.startswith(FOLDER_PREFIX):
                    discard(storage.join(shards, name), FILES)
        discard(states, "")

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Context of the training. After a failure, removes the folder, or keeps it and tells the user."""
        try:
            yield
        except BaseException as error:
            advice = self._leave()
            if not advice:
                raise
            if isinstance(error, WorkerError):
                raise WorkerError(error.failures, error.advice + advice) from None
            if isinstance(error, TrainingCancelledError):
                raise TrainingCancelledError(f"{error}{advice}") from None
            _logger.warning("the training ended by %s%s", type(error).__name__, advice)
            raise

    def _leave(self) -> str:
        """Removes the folder, or keeps it and returns advice for the user."""
        if not self._is_mine:
            return ""
        with suppress(OSError):
            owner = read_owner(self.uri)
            if owner is not None and owner.token != self.token:
                return ""  # another driver owns the folder now
            if self.is_given and self.has_checkpoint():
                # A later start writes them again.
                self._discard(run_layout.FIRST_WEIGHTS)
                return f"; its last checkpoint is kept in {self.uri!r}: fit again with resume=True to resume"
        if not self.is_given:
            self.discard()
            return ""
        with suppress(OSError):
            storage.remove(storage.join(self.uri, run_layout.OWNER))  # first: without it no rank writes
            for name in self._own_names():
                self._discard(name)
            if not self._was_there:
                storage.remove_if_empty(self.uri)
        return ""

    def discard(self) -> None:
        """Removes the folder unless another driver owns it by now."""
        with suppress(OSError):
            owner = read_owner(self.uri)
            if owner is None or owner.token == self.token:
                discard(self.uri, run_layout.PATHS, None if owner is None else run_layout.OWNER)

    def _discard(self, name: str) -> None:
        discard(storage.join(self.uri, name), run_layout.PARTS)

    def _own_names(self) -> list[str]:
        names = storage.list_names(self.uri)
        foreign = run_layout.foreign_names(names)
        return [name for name in names if name not in foreign]

    def has_checkpoint(self) -> bool:
        root = checkpoints_uri(self.uri)
        return any(is_committed(root, step) for step in list_steps(root))
