"""Runs the rounds of a population: all members train, then the worst resume from the best.

In each round, each member trains in a new folder, which starts with a copy of a checkpoint of the previous
round. If the driver was killed, a new driver resumes the unfinished round.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from pyspark.sql import DataFrame

from ringspark.estimators.checked_fit import CheckedFit
from ringspark.estimators.failures import WorkerError
from ringspark.estimators.run.folder import RunFolder, RunRefusedError
from ringspark.estimators.training.checkpoint.folders import checkpoints_uri, copy_checkpoint
from ringspark.estimators.training.settings.config import TrainConfig
from ringspark.extras.runs.stored_runs import discard_run
from ringspark.extras.search.objective import Objective
from ringspark.extras.search.population import Member, Population
from ringspark.extras.search.space import Space
from ringspark.extras.search.stop_file import ask_to_stop
from ringspark.extras.search.trainings import (
    SearchFolder,
    check_settings,
    damage_error,
    failure_reason,
    run_in_threads,
    train_in,
)
from ringspark.extras.search.trial_data import TrialData
from ringspark.extras.search.trial_table import EPOCHS, REASON, SECONDS, in_words
from ringspark.pipelines import storage
from ringspark.pipelines.typed_json import parse_object, record

STATE = "population.json"
ROUND = "round"

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A member's result in a round; `value` is None if it failed.

    Attributes:
        steps: Optimizer steps in all rounds so far. The next round resumes from the checkpoint of this step.
        epochs: Epochs in all rounds so far.
        reason: Error message; empty if it did not fail.
    """

    value: float | None = None
    steps: int = 0
    epochs: int = 0
    seconds: float = 0.0
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class _State:
    """Content of `population.json`: finished rounds, and settings that a resumed search must repeat."""

    about: dict[str, str]
    rounds: tuple[tuple[Trained, ...], ...]


class PopulationLoop:
    def __init__(
        self,
        *,
        population: Population,
        space: Space,
        objective: Objective,
        data: TrialData,
        dataset: DataFrame,
        run_uri: str | None,
        about: Mapping[str, str],
        epochs: int,
        epochs_per_round: int,
    ) -> None:
        self._population, self._space, self._objective = population, space, objective
        self._data, self._dataset, self._run_uri = data, dataset, run_uri
        self._about = dict(about)
        self._epochs, self._epochs_per_round = epochs, epochs_per_round
        self._search_folder = SearchFolder(run_uri)
        self._lock = threading.Lock()
        self._running: set[str] = set()
        self._errors: list[BaseException] = []
        self._folders: dict[tuple[int, int], str] = {}
        self._models: dict[int, Any] = {}
        self._rounds: list[list[Trained]] = self._read_rounds()

    def run(self, parallelism: int) -> tuple[Any, dict[str, Any], list[dict[str, Any]]]:
        """Trains the missing rounds; returns the best model, its settings, and the rows of `trials`."""
        self._search_folder.claim()
        members, rows = self._population.first(), []
        num_rounds = math.ceil(self._epochs / self._epochs_per_round)
        try:
            for number in range(num_rounds):
                if number:
                    members = self._population.after(number - 1, members, self._values(number - 1))
                if number == len(self._rounds):
                    self._train_round(number, members, parallelism)
                rows += [_row(number, *each) for each in zip(members, self._rounds[number], strict=True)]
                if not self._population.ranked(self._values(number)):
                    reason = self._rounds[number][-1].reason
                    raise RuntimeError(
                        f"all members of the population failed in round {number}; correct the error: {reason}"
                    )
            last = num_rounds - 1
            best = members[self._population.ranked(self._values(last))[0]]
            # The model of an earlier driver's training, from its folder.
            model = self._models.get(best.number) or self._train(last, best)
        except BaseException:
            if self._run_uri is None:
                self._discard_all(None)
            raise
        self._discard_all((last, best.number))
        return model, best.settings, rows

    def _values(self, number: int) -> list[float | None]:
        return [trained.value for trained in self._rounds[number]]

    def _train_round(self, number: int, members: list[Member], parallelism: int) -> None:
        waiting, ended = list(members), {}

        def work() -> None:
            try:
                while True:
                    with self._lock:
                        if self._errors or not waiting:
                            return
                        member = waiting.pop(0)
                    trained = self._reached(number, member)
                    with self._lock:
                        ended[member.number] = trained
            except BaseException as error:
                self._end(error)

        spark, threads = self._dataset.sparkSession, min(parallelism, len(members))
        run_in_threads(spark, work, threads, watch=lambda: None, end=self._end)
        if self._errors:
            raise self._errors[0]
        self._rounds.append([ended[member.number] for member in members])
        self._save_rounds()
        for key in [key for key in self._folders if key[0] < number]:
            discard_run(self._folders.pop(key))

    def _end(self, error: BaseException) -> None:
        with self._lock:
            self._errors.append(error)
            running = list(self._running)
        for uri in running:
            ask_to_stop(uri)

    def _reached(self, number: int, member: Member) -> Trained:
        started = time.monotonic()
        try:
            model = self._train(number, member)
            value = self._objective.of_trial(model)
            if not math.isfinite(value):
                raise ValueError(f"the value of the member is {value}")
        except RunRefusedError:
            raise  # not the member's fault
        except (WorkerError, ValueError) as error:
            reason = failure_reason(error)
            if not self._errors:
                _logger.warning("member %d failed in round %d: %s", member.number, number, reason)
            return Trained(reason=reason, seconds=time.monotonic() - started)
        with self._lock:
            self._models[member.number] = model
        return Trained(
            value=value,
            steps=model.summary.steps,
            epochs=len(model.summary.epochs),
            seconds=time.monotonic() - started,
        )

    def _train(self, number: int, member: Member) -> Any:
        estimator = self._space.applied(member.settings)
        if self._run_uri is None:
            run = RunFolder.new(estimator._storage_root(self._dataset.sparkSession))
            self._folders[number, member.number] = run.uri
        else:
            run = RunFolder.given(self._folder(number, member.number), resume=True)

        def begin(fit: CheckedFit, stop_uri: str) -> TrainConfig:
            with self._lock:
                self._running.add(stop_uri)
                is_over = bool(self._errors)
            if is_over:
                ask_to_stop(stop_uri)
            if member.copied_from is not None and run.identity() is None:
                source = self._folder(number - 1, member.copied_from)
                steps = self._rounds[number - 1][member.copied_from].steps
                copy_checkpoint(checkpoints_uri(source), checkpoints_uri(run.uri), steps)
            end = (number + 1) * self._epochs_per_round
            return replace(fit.config, pause_after=end if end < self._epochs else None)

        try:
            return train_in(run, estimator, self._dataset, self._data, begin)
        finally:
            with self._lock:
                self._running = {uri for uri in self._running if not uri.startswith(f"{run.uri}/")}

    def _folder(self, number: int, member: int) -> str:
        if self._run_uri is None:
            return self._folders[number, member]
        uri = storage.join(self._run_uri, f"{ROUND}-{number}", f"member-{member}")
        self._folders[number, member] = uri
        return uri

    def _discard_all(self, kept: tuple[int, int] | None) -> None:
        if self._run_uri is None:
            for key, uri in self._folders.items():
                if key != kept:
                    discard_run(uri)
            return
        assert kept is not None
        self._search_folder.check_owner()
        for name in storage.list_names(self._run_uri):
            if not name.startswith(f"{ROUND}-"):
                continue
            folder = storage.join(self._run_uri, name)
            for member in storage.list_names(folder):
                if (name, member) != (f"{ROUND}-{kept[0]}", f"member-{kept[1]}"):
                    discard_run(storage.join(folder, member))
            storage.remove_if_empty(folder)

    def _read_rounds(self) -> list[list[Trained]]:
        if self._run_uri is None:
            return []
        uri = storage.join(self._run_uri, STATE)
        try:
            known = record(_State, parse_object(storage.read_bytes(uri)))
        except FileNotFoundError:
            return []
        except ValueError as error:
            raise damage_error(self._run_uri, STATE, error) from None
        check_settings(self._run_uri, known.about, self._about)
        size = self._population.size
        for number, entries in enumerate(known.rounds):
            if len(entries) != size:
                problem = f"round {number} has {len(entries)} members instead of {size}"
                raise damage_error(self._run_uri, STATE, problem)
        return [list(entries) for entries in known.rounds]

    def _save_rounds(self) -> None:
        if self._run_uri is None:
            return
        self._search_folder.check_owner()
        state = asdict(_State(about=self._about, rounds=tuple(map(tuple, self._rounds))))
        storage.write_atomic(storage.join(self._run_uri, STATE), json.dumps(state, indent=1).encode())


def _row(number: int, member: Member, trained: Trained) -> dict[str, Any]:
    return {
        "round": number,
        "member": member.number,
        "state": "failed" if trained.value is None else "complete",
        "value": trained.value,
        "copied_from": member.copied_from,
        "params": in_words(member.settings),
        SECONDS: trained.seconds,
        EPOCHS: trained.epochs,
        REASON: trained.reason,
    }
