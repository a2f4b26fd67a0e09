"""Runs the rounds of a population: all members train, then the worst resume from the best.

In each round, each member trains in a new folder, which starts with a copy of a checkpoint of the previous
round. If the driver was killed, a new driver resumes the unfinished round.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ringspark.estimators.checked_fit import CheckedFit
from ringspark.estimators.failures import WorkerError
from ringspark.estimators.names import first_line
from ringspark.estimators.run.folder import RunFolder, RunRefusedError
from ringspark.estimators.training.checkpoint.folders import checkpoints_uri, copy_checkpoint
from ringspark.extras.search.population import Member, Population
from ringspark.extras.search.trainings import ROUND, Trainings, check_settings, damage_error
from ringspark.extras.search.trial_table import EPOCHS, REASON, SECONDS, in_words
from ringspark.pipelines import storage
from ringspark.pipelines.typed_json import JsonText

STATE = "population.json"

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
class _State(JsonText):
    """Content of `population.json`: finished rounds, and settings that a resumed search must repeat."""

    about: dict[str, str]
    rounds: tuple[tuple[Trained, ...], ...]


class PopulationLoop:
    def __init__(
        self,
        trainings: Trainings,
        population: Population,
        *,
        about: Mapping[str, str],
        epochs: int,
        epochs_per_round: int,
    ) -> None:
        self._trainings, self._population, self._about = trainings, population, dict(about)
        self._epochs, self._epochs_per_round = epochs, epochs_per_round
        self._models: dict[int, Any] = {}
        self._rounds = self._read_rounds()

    def run(self, parallelism: int) -> tuple[Any, dict[str, Any], list[dict[str, Any]]]:
        """Trains the missing rounds; returns the best model, its settings, and the rows of `trials`."""
        members, rows = self._population.first(), []
        num_rounds = math.ceil(self._epochs / self._epochs_per_round)
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
        self._trainings.keep_only(_name(last, best.number))
        return model, best.settings, rows

    def _values(self, number: int) -> list[float | None]:
        return [trained.value for trained in self._rounds[number]]

    def _train_round(self, number: int, members: list[Member], parallelism: int) -> None:
        results: dict[int, Trained] = {}

        def work(member: Member) -> None:
            results[member.number] = self._reached(number, member)

        tasks = (partial(work, member) for member in members)
        self._trainings.run(tasks, min(parallelism, len(members)))
        self._rounds.append(tuple(results[member.number] for member in members))
        if self._trainings.run_uri is not None:
            self._trainings.check_owner()
            state = _State(about=self._about, rounds=tuple(self._rounds)).to_json()
            storage.write_atomic(storage.join(self._trainings.run_uri, STATE), state.encode())
        for member in members:
            self._trainings.discard(_name(number - 1, member.number))

    def _reached(self, number: int, member: Member) -> Trained:
        started = time.monotonic()
        try:
            model = self._train(number, member)
            value = self._trainings.objective.of_trial(model)
            if not math.isfinite(value):
                raise ValueError(f"the value of the member is {value}")
        except RunRefusedError:
            raise  # not the member's fault
        except (WorkerError, ValueError) as error:
            reason = first_line(error)
            if not self._trainings.is_over:
                _logger.warning("member %d failed in round %d: %s", member.number, number, reason)
            return Trained(reason=reason, seconds=time.monotonic() - started)
        self._models[member.number] = model
        return Trained(
            value=value,
            steps=model.summary.steps,
            epochs=len(model.summary.epochs),
            seconds=time.monotonic() - started,
        )

    def _train(self, number: int, member: Member) -> Any:
        def begin(run: RunFolder, fit: CheckedFit) -> CheckedFit:
            if member.copied_from is not None and run.identity() is None:
                source = self._trainings.uri(_name(number - 1, member.copied_from))
                steps = self._rounds[number - 1][member.copied_from].steps
                copy_checkpoint(checkpoints_uri(source), checkpoints_uri(run.uri), steps)
            end = (number + 1) * self._epochs_per_round
            return replace(fit, config=replace(fit.config, pause_after=end if end < self._epochs else None))

        return self._trainings.train(_name(number, member.number), member.settings, begin)

    def _read_rounds(self) -> list[tuple[Trained, ...]]:
        run_uri, size = self._trainings.run_uri, self._population.size
        if run_uri is None:
            return []
        try:
            known = _State.from_json(storage.read_bytes(storage.join(run_uri, STATE)))
        except FileNotFoundError:
            return []
        except ValueError as error:
            raise damage_error(run_uri, STATE, error) from None
        check_settings(run_uri, known.about, self._about)
        for number, entries in enumerate(known.rounds):
            if len(entries) != size:
                problem = f"round {number} has {len(entries)} members instead of {size}"
                raise damage_error(run_uri, STATE, problem)
        return list(known.rounds)


def _name(number: int, member: int) -> str:
    return f"{ROUND}{number}/member-{member}"


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
