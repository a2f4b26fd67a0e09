"""A run with its hash chain, and the checks that need no training."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch

from ringspark.estimators import run_layout
from ringspark.estimators.run.folder import RunFolder
from ringspark.estimators.run.identity import list_differences
from ringspark.estimators.training.checkpoint.folders import checkpoints_uri, step_uri
from ringspark.estimators.training.checkpoint.reading import verify
from ringspark.estimators.training.checkpoint.record import Record
from ringspark.estimators.training.checkpoint.weights import read_info
from ringspark.estimators.training.history import parse_history
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.estimators.training.worker import FinishedRun
from ringspark.extras.certificate.certificate import check_signature
from ringspark.extras.certificate.chain import Chain, Link, find_breaks
from ringspark.extras.certificate.claims import PLACES, digest_manifest, list_claims
from ringspark.extras.certificate.compare import drop_times
from ringspark.extras.certificate.recorder import digest_run, digest_weights
from ringspark.models import ModelSpec
from ringspark.pipelines import ShardManifest, storage
from ringspark.pipelines.manifest import MANIFEST_NAME


@dataclass(frozen=True, kw_only=True)
class Check:
    """One check: `problem` is empty if the claim holds; `is_done` is False if it could not be checked."""

    name: str
    problem: str = ""
    note: str = ""
    is_done: bool = True


@dataclass(frozen=True)
class ClaimedRun:
    """A local run folder and its chain."""

    uri: str
    chain: Chain

    @property
    def checkpoints(self) -> list[Link]:
        return self.chain.checkpoints

    @property
    def end(self) -> Link | None:
        """The link of the final weights; None if the training has not finished."""
        last = self.chain.links[-1]
        return last if last.kind == "end" else None

    @cached_property
    def shards_uri(self) -> str:
        """The shards in the run's folder, which may have moved; else the shards of the last start."""
        own = storage.join(self.uri, run_layout.SHARDS)
        if storage.exists(storage.join(own, MANIFEST_NAME)):
            return own
        config = json.loads(storage.read_bytes(storage.join(self.uri, run_layout.CONFIG)))
        return str(config["shards_uri"])

    def claims(self, step: int) -> dict[str, Any]:
        """Returns the claims of the start that trained the step before `step`."""
        return self.chain.find_start(step).content

    def config(self, claims: dict[str, Any], run_uri: str | None = None) -> TrainConfig:
        """Returns the claimed settings, for a training in `run_uri`.

        Raises ValueError if the class of the network may come from a file in the run's folder.
        """
        places = dict(zip(PLACES, (self.shards_uri, run_uri or self.uri), strict=True))
        config = TrainConfig.from_json(json.dumps(claims["config"] | places))
        if config.model is not None:
            ModelSpec.from_json(config.model).check_apart(self.uri)
        return config

    def checkpoint_uri(self, step: int) -> str:
        return step_uri(checkpoints_uri(self.uri), step)

    @cached_property
    def records(self) -> dict[int, Record]:
        """Checks every file of every checkpoint; raises ValueError at the first one that differs."""
        found = {}
        for link in self.checkpoints:
            uri = self.checkpoint_uri(link.step)
            try:
                found[link.step] = verify(uri)
            except OSError as error:
                raise ValueError(f"{uri} cannot be read: {error}; take another copy of the run") from error
            if read_info(uri).training_sha256 != link.content["training_sha256"]:
                raise ValueError(
                    f"{uri} is not the checkpoint in the hash chain; take another copy of the run"
                )
        return found


def check_claims(
    run: ClaimedRun, objects: UserObjects, key: str | os.PathLike[str] | None
) -> Iterator[Check]:
    """Yields the checks of signature, chain, checkpoints, settings, data, code and final weights."""
    if key is None:
        yield Check(name="signature", is_done=False, note="no public key was given")
    else:
        yield Check(name="signature", problem=check_signature(run.uri, key))
    breaks = find_breaks(run.chain)
    yield Check(name="hash chain", problem=" ".join(breaks), note=f"head {run.chain.head[:16]}")
    if breaks:
        return
    checkpoints = _check_checkpoints(run)
    yield checkpoints
    if checkpoints.problem:
        return
    yield Check(name="settings", problem=_check_settings(run), note=_describe_starts(run))
    data = Check(name="data", problem=_check_data(run))
    yield data
    if data.problem:
        return
    yield _check_code(run, objects)
    if run.end is not None:
        weights = Check(name="files of the final weights", problem=_check_end(run, run.end))
        history = _check_history(run)
        yield from (weights, history)
        if not weights.problem and not history.problem:
            yield _check_files(run, run.end)


def _check_checkpoints(run: ClaimedRun) -> Check:
    try:
        steps = run.records.keys()
    except ValueError as error:
        return Check(name="checkpoints", problem=f"A checkpoint does not hold: {error}.")
    every = run.claims(max(steps))["config"]["checkpoint_every_steps"]
    # A slow store can cost a checkpoint, so the interval is longer, but no claim is wrong.
    lost = [step for step in range(min(steps), max(steps), every) if step not in steps] if every else []
    note = f"{len(steps)} of steps {min(steps)} to {max(steps)}"
    if lost:
        note += f"; missing at {', '.join(map(str, lost[:5]))}, so these intervals are longer"
    return Check(name="checkpoints", note=note)


def _check_settings(run: ClaimedRun) -> str:
    begun = RunFolder(run.uri, is_given=True).identity()
    claimed = run.claims(run.checkpoints[-1].step)["identity"]
    if begun is not None and (found := list_differences(begun.identity, claimed)):
        return f"The run claims other settings than its hash chain: {found[0]}."
    return ""


def _describe_starts(run: ClaimedRun) -> str:
    """Names the starts of the training, and which claims changed between two of them."""
    starts = [link for link in run.chain.links if link.kind == "start"]
    found = []
    for before, now in pairwise(starts):
        changed = list_differences(before.content["identity"], now.content["identity"])
        changed += [
            f"{name}: {before.content['config'][name]} -> {now.content['config'][name]}"
            for name in ("num_workers", "epochs", "precision")
            if before.content["config"][name] != now.content["config"][name]
        ]
        changed += [
            f"the {name} changed"
            for name in ("code", "platform")
            if before.content[name] != now.content[name]
        ]
        found.append(
            f"resumed at step {now.step}" + (f" with changes: {'; '.join(changed)}" if changed else "")
        )
    return "; ".join(found)


def _check_data(run: ClaimedRun) -> str:
    try:
        manifest = ShardManifest.load(run.shards_uri)
        digests = {link.content["data"] for link in run.chain.links if link.kind == "start"}
        if digests != {digest_manifest(manifest)}:
            return f"The manifest in {run.shards_uri} is not the one in the hash chain."
        manifest.verify()
    except (ValueError, OSError) as error:
        return f"The rows differ from their manifest: {error}."
    return ""


def _check_code(run: ClaimedRun, objects: UserObjects) -> Check:
    """Compares code and settings with the given model. A replay of a start trains by its config alone."""
    manifest = ShardManifest.load(run.shards_uri)
    last = run.claims(run.checkpoints[-1].step)
    starts = [link.content for link in run.chain.links if link.kind == "start"]
    for number, claims in enumerate(starts, 1):
        given = list_claims(run.config(claims), objects, manifest, torch.device("cpu"))
        found = list_differences(claims["identity"], given["identity"])
        if "first weights" in given["identity"]["model"]:  # `describe_unknown_start` compares them
            found = [change for change in found if not change.startswith("first weights")]
        if found and claims["config"] == last["config"]:
            return Check(name="code", problem=f"The given model differs from the trained one: {found[0]}.")
        if found:
            return Check(
                name="code", problem=f"Start {number} claims other settings than its own: {found[0]}."
            )
    given = list_claims(run.config(last), objects, manifest, torch.device("cpu"))
    if given["platform"]["python"] != last["platform"]["python"]:
        return Check(name="code", is_done=False, note="another version of Python has other bytecode")
    if given["code"] != last["code"]:
        return Check(name="code", problem="The code of the given model is not the code of the training.")
    return Check(name="code")


def _check_end(run: ClaimedRun, end: Link) -> str:
    folder = storage.join(run.uri, end.content["folder"])
    if digest_weights(folder) != end.content["files"]:
        return f"The final weights in {folder} are not the ones in the hash chain."
    with suppress(FileNotFoundError, ValueError):  # `_check_history` reports a damaged file
        result = storage.read_bytes(storage.join(run.uri, run_layout.RESULT))
        named = FinishedRun.from_json(result).result.checkpoint_uri
        if named.rpartition("/")[2] != end.content["folder"]:
            return f"{run_layout.RESULT} names other final weights than the hash chain: {named}."
    return ""


def _check_files(run: ClaimedRun, end: Link) -> Check:
    known = end.content.get("run")
    if known is None:
        return Check(name="files of the run", is_done=False, note="the driver ended before it recorded them")
    try:
        found = digest_run(run.uri, end.content["folder"])
    except OSError as error:
        return Check(name="files of the run", problem=f"A file of the run cannot be read: {error}.")
    changed = sorted(name for name in known.keys() | found.keys() if known.get(name) != found.get(name))
    problem = f"{changed[0]} is not the file in the hash chain." if changed else ""
    return Check(name="files of the run", problem=problem)


def _check_history(run: ClaimedRun) -> Check:
    """Compares the published history with the one in the last checkpoint, which a replay repeats."""
    known = [drop_times(epoch) for epoch in run.records[run.checkpoints[-1].step].position.history]
    for name in (run_layout.HISTORY, run_layout.RESULT):
        uri = storage.join(run.uri, name)
        if not storage.exists(uri):
            continue
        try:
            data = storage.read_bytes(uri)
            is_result = name == run_layout.RESULT
            epochs = FinishedRun.from_json(data).result.history if is_result else parse_history(data)
            found = [drop_times(epoch) for epoch in epochs]
        except ValueError as error:
            return Check(name="history", problem=f"{name} cannot be read: {error}.")
        # As JSON, because NaN does not equal itself.
        if json.dumps(found[: len(known)]) != json.dumps(known):
            return Check(name="history", problem=f"The history in {name} is not the one of the checkpoints.")
        if len(found) > len(known):
            note = f"no checkpoint has the epochs after {len(known)}"
            return Check(name="history", is_done=False, note=note)
    return Check(name="history")


def describe_unknown_start(run: ClaimedRun, objects: UserObjects) -> str:
    """Returns why a training of the given objects cannot repeat the first checkpoint; empty if it can."""
    claims = run.claims(0)
    config = run.config(claims)
    if step := run.checkpoints[0].step:
        return f"the chain begins at step {step}, and nothing shows how its weights came about"
    if config.start_weights is not None:
        return "the training began with stored weights, which may be gone"
    given = list_claims(config, objects, ShardManifest.load(run.shards_uri), torch.device("cpu"))
    known, found = (each["identity"]["model"].get("first weights") for each in (claims, given))
    return "" if known == found else "the training began with other weights than the given model"
