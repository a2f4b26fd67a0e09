"""One training as one run of MLflow: records are queued here until the server has accepted them.

Each metric is sent once: a resumed training first reads the run's metrics.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import mlflow
from mlflow import MlflowClient
from mlflow.entities import Dataset, DatasetInput, InputTag, LoggedModelOutput, Metric, Param, RunTag
from mlflow.exceptions import MlflowException
from mlflow.tracking.context import registry
from mlflow.tracking.fluent import _get_experiment_id

import ringspark
from ringspark.estimators import run_layout
from ringspark.estimators.lazy_imports import load_object
from ringspark.estimators.tracking.base import Listener, RunEnd, RunStart
from ringspark.estimators.training.history import EpochRecord
from ringspark.estimators.training.step_log import StepRecord
from ringspark.extras.tracking.mlflow_tracker import CONTEXT, EXPERIMENT, PARENT, MlflowTracker
from ringspark.pipelines import storage
from ringspark.pipelines.typed_json import parse_object

_log = logging.getLogger(__name__)

# File in the run's tracking folder with the server and id of the MLflow run.
FILE = "mlflow.json"
# Function that writes the logged model, by its path, because stages are above trackers.
SAVE_MODEL = "ringspark.extras.serving.logged_model:save"
MODEL = "model"

# MLflow's limits of a text.
PARAM_LENGTH = 6000
TAG_LENGTH = 5000
NAME_LENGTH = 250

# Seconds to wait for a connection.
CONNECT_SECONDS = 5.0

_STATUS = {"finished": "FINISHED", "failed": "FAILED", "cancelled": "KILLED"}


class MlflowRun(Listener):
    """A listener that sends to one run. The first call that reaches the server creates or finds this run."""

    def __init__(self, tracker: MlflowTracker, run: RunStart) -> None:
        self._tracker, self._run = tracker, run
        self._uri: str = tracker.tracking_uri or mlflow.get_tracking_uri()
        self._client: Any = None
        self._run_id = ""
        self._found: Any = None
        self._begun = int(time.time() * 1000)
        # Sent metrics, and waiting metrics: (name, value, time in ms, step).
        self._sent: set[tuple[str, int, str]] = set()
        self._waiting: list[tuple[str, float, int, int]] = []
        self._epochs: dict[int, EpochRecord] = {}
        self._last: StepRecord | None = None
        self._has_warned = False
        self._try_to_send()

    def steps(self, records: Sequence[StepRecord]) -> None:
        for record in records:
            values = {"step/train_loss": record.train_loss, "step/learning_rate": record.learning_rate}
            last, self._last = self._last, record
            if last is not None and record.step > last.step and record.seconds > last.seconds:
                values["step/rows_per_second"] = (record.rows - last.rows) / (record.seconds - last.seconds)
            self._note(values, record.seconds, record.step)
        self._try_to_send()

    def epoch(self, record: EpochRecord) -> None:
        self._epochs[record.epoch] = record
        past = [epoch for number, epoch in self._epochs.items() if number <= record.epoch]
        values = record.numbers() | {
            "epoch": record.epoch,
            "epoch_seconds": record.seconds,
            "skipped_steps": record.skipped_steps,
        }
        self._note(values, sum(epoch.seconds for epoch in past), sum(epoch.steps for epoch in past))
        self._try_to_send()

    def end(self, end: RunEnd) -> None:
        self._try_to_send()
        if self._has_warned:
            # The rest is lost, as the warning said, but an existing run is still ended.
            if self._found is not None:
                with suppress(MlflowException, OSError):
                    _connect(self._uri)
                    self._client.set_terminated(self._found.info.run_id, _STATUS[end.status])
            return
        problems = []
        if end.error:
            self._client.set_tag(self._run_id, "ringspark.error", end.error[:TAG_LENGTH])
        for log in (self._log_files, lambda: self._log_model(end.model)):
            try:
                log()
            except Exception as error:
                problems.append(error)
        self._client.set_terminated(self._run_id, _STATUS[end.status])
        if problems:
            raise problems[0]

    def _note(self, values: Mapping[str, float], seconds: float, step: int) -> None:
        at = self._begun + int(seconds * 1000)
        self._waiting += [(_name(name), float(value), at, step) for name, value in values.items()]

    def _try_to_send(self) -> None:
        try:
            self._send()
            self._has_warned = False
        except (MlflowException, OSError) as error:
            if not self._has_warned:
                self._has_warned = True
                _log.warning(
                    "MLflow at %s accepts no data (%s); the training continues and sends its metrics once "
                    "MLflow answers; metrics that are still unsent at the end of the training are lost",
                    _without_secrets(self._uri),
                    _short(error),
                )

    def _send(self) -> None:
        _connect(self._uri)
        if not self._run_id:
            self._begin()
        new = {
            _known(name, step, value): Metric(name, value, at, step)
            for name, value, at, step in self._waiting
        }
        metrics = [metric for key, metric in new.items() if key not in self._sent]
        self._client.log_batch(self._run_id, metrics=metrics, synchronous=True)
        self._sent |= new.keys()
        self._waiting.clear()

    def _begin(self) -> None:
        self._client = MlflowClient(tracking_uri=self._uri, registry_uri=self._tracker.registry_uri)
        self._found = found = self._found or self._find_earlier() or self._create()
        self._begun = found.info.start_time or self._begun
        self._log_settings(found)
        self._log_data(found)
        # Last: an attempt that failed half-way starts again, in the same run.
        self._run_id = found.info.run_id

    def _find_earlier(self) -> Any:
        try:
            known = parse_object(storage.read_bytes(self._file()))
        except (OSError, ValueError):
            return None
        if known.get("tracking_uri") != _without_secrets(self._uri):
            return None
        run = self._get_run(str(known.get("run_id")))
        if run is None or run.info.lifecycle_stage != "active":
            return None
        self._client.update_run(run.info.run_id, status="RUNNING")
        for name in run.data.metrics:
            history = self._client.get_metric_history(run.info.run_id, name)
            self._sent |= {_known(name, metric.step, metric.value) for metric in history}
        return run

    def _create(self) -> Any:
        tracker, around = self._tracker, self._run.surroundings
        tags = {
            **_context(around),
            "ringspark.run_uri": _without_secrets(self._run.run_uri),
            "ringspark.version": ringspark.__version__,
            "ringspark.stage": self._run.name,
            **{str(key): str(value) for key, value in (tracker.tags or {}).items()},
        }
        parent = self._find_parent()
        experiment = around.get(EXPERIMENT)
        if parent is not None:
            tags["mlflow.parentRunId"] = parent.info.run_id
            experiment = parent.info.experiment_id
        if tracker.experiment is not None:
            experiment = _get_or_create_experiment(self._client, tracker.experiment)
        # The experiment of `mlflow.start_run()`: public functions would also set the process's active run.
        run = self._client.create_run(
            experiment or str(_get_experiment_id()),
            start_time=self._begun,
            tags={key: storage.redact_text(value)[:TAG_LENGTH] for key, value in tags.items()},
            run_name=tracker.run_name or self._run.name,
        )
        text = json.dumps({"tracking_uri": _without_secrets(self._uri), "run_id": run.info.run_id})
        with suppress(OSError):  # then a resumed training creates another run
            storage.write_atomic(self._file(), text.encode(), durable=False)
        return run

    def _find_parent(self) -> Any:
        if self._tracker.parent_run_id is not None:
            return self._client.get_run(self._tracker.parent_run_id)
        if not self._tracker.nested or PARENT not in self._run.surroundings:
            return None
        parent = self._get_run(self._run.surroundings[PARENT])
        return parent if parent is not None and parent.info.status == "RUNNING" else None

    def _get_run(self, run_id: str) -> Any:
        """Returns a run, or None if the server does not have it."""
        try:
            return self._client.get_run(run_id)
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return None
            raise

    def _log_settings(self, run: Any) -> None:
        facts = {f"data.{name}": value for name, value in self._run.data.items()}
        values = {**self._run.settings, **facts}
        texts = {
            _name(name): (value if isinstance(value, str) else json.dumps(value, default=str))[:PARAM_LENGTH]
            for name, value in values.items()
        }
        known = run.data.params
        params = [Param(name, text) for name, text in texts.items() if name not in known]
        # Params of a run cannot change, but some settings may differ in a resumed training.
        tags = [
            RunTag(f"ringspark.resumed.{name}", text[:TAG_LENGTH])
            for name, text in texts.items()
            if known.get(name, text) != text
        ]
        self._client.log_batch(run.info.run_id, params=params, tags=tags, synchronous=True)

    def _log_data(self, run: Any) -> None:
        data = self._run.data
        if run.inputs is not None and run.inputs.dataset_inputs:
            return
        uri = str(data.get("shards_uri", ""))
        facts = json.dumps({"num_rows": data.get("rows"), "num_validation_rows": data.get("validation_rows")})
        dataset = Dataset(
            name=uri.rstrip("/").rpartition("/")[2] or "rows",
            digest=hashlib.sha256((uri + facts).encode()).hexdigest()[:16],
            source_type="spark",
            source=json.dumps({"path": _without_secrets(uri)}),
            profile=facts,
        )
        inputs = [DatasetInput(dataset=dataset, tags=[InputTag("mlflow.data.context", "training")])]
        try:
            try:
                self._client.log_inputs(run.info.run_id, inputs)
            except MlflowException:
                # A parallel trial has inserted the record of the same data in between.
                _connect(self._uri)
                self._client.log_inputs(run.info.run_id, inputs)
        except MlflowException as error:
            _log.warning("MLflow refused the facts about the data (%s); the run lacks them", _short(error))

    def _log_files(self) -> None:
        for name in (run_layout.HISTORY, run_layout.CONFIG):
            try:
                text = storage.read_bytes(storage.join(self._run.run_uri, name)).decode()
            except FileNotFoundError:
                continue
            self._client.log_text(self._run_id, text, name)

    def _log_model(self, model: Any) -> None:
        if model is None or not self._tracker.log_model:
            return
        # The server must know the model before its files, which name it.
        logged = self._client.create_logged_model(
            self._found.info.experiment_id, name=MODEL, source_run_id=self._run_id, model_type="ringspark"
        )
        status = "FAILED"
        try:
            with tempfile.TemporaryDirectory(prefix="ringspark-") as folder:
                local = str(Path(folder) / MODEL)
                save: Any = load_object(SAVE_MODEL)
                save(model, local, self._run_id, logged.model_id, self._tracker.runtime)
                self._client.log_model_artifacts(logged.model_id, local)
            status = "READY"
        finally:
            self._client.finalize_logged_model(logged.model_id, status)
        step = sum(epoch.steps for epoch in self._epochs.values())
        self._client.log_outputs(self._run_id, [LoggedModelOutput(logged.model_id, step)])
        if self._tracker.registered_model_name is not None:
            self._register(self._tracker.registered_model_name, logged)

    def _register(self, name: str, logged: Any) -> None:
        try:
            self._client.create_registered_model(name)
        except MlflowException as error:
            if error.error_code not in ("RESOURCE_ALREADY_EXISTS", "ALREADY_EXISTS"):
                raise
        # A server resolves the model's name itself. With a database, this process resolves it, and would
        # use the process's own tracking URI.
        is_server = urlsplit(self._uri).scheme in ("http", "https") or self._uri.startswith("databricks")
        source = f"models:/{logged.model_id}" if is_server else logged.artifact_location
        made = self._client.create_model_version(
            name, source=source, run_id=self._run_id, model_id=logged.model_id, await_creation_for=0
        )
        if self._tracker.alias is not None:
            self._client.set_registered_model_alias(name, self._tracker.alias, made.version)

    def _file(self) -> str:
        return storage.join(self._run.run_uri, run_layout.TRACKING, FILE)


def _connect(uri: str) -> None:
    """Raises OSError if nobody listens at the server's address, because MLflow's own retries take minutes."""
    parts = urlsplit(uri)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return
    if parts.scheme in getproxies() and not proxy_bypass(parts.hostname):
        return
    port = parts.port or (443 if parts.scheme == "https" else 80)
    socket.create_connection((parts.hostname, port), CONNECT_SECONDS).close()


def _get_or_create_experiment(client: Any, name: str) -> str:
    found = client.get_experiment_by_name(name)
    if found is None:
        try:
            return str(client.create_experiment(name))
        except MlflowException as error:
            # Another training has created it in between.
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
            found = client.get_experiment_by_name(name)
    return str(found.experiment_id)


def _context(surroundings: Mapping[str, str]) -> dict[str, str]:
    if CONTEXT in surroundings:
        found: dict[str, str] = json.loads(surroundings[CONTEXT])
        return found
    return dict(registry.resolve_tags())


def _known(name: str, step: int, value: float) -> tuple[str, int, str]:
    # Servers store infinity as the largest number.
    value = float(value)
    if abs(value) >= sys.float_info.max:
        value = math.copysign(math.inf, value)
    return name, int(step), repr(value)


def _name(name: str) -> str:
    # the characters and length that MLflow accepts
    return re.sub(r"[^\w.\-/ ]", "_", name)[:NAME_LENGTH]


def _short(error: Exception) -> str:
    return storage.redact_text(str(error).split("\n", 1)[0])[:300]


def _without_secrets(uri: str) -> str:
    return re.sub(r"(?<=://)[^/@]*@", "", storage.redact(uri))
