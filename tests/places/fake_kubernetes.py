"""An API server of Kubernetes for Spark: it starts each executor pod as a process on loopback.

It knows pods and configmaps, by name and by label, as Spark's scheduler asks for them. `pending_seconds`
delays pods; `room` limits how many get a node; the image of `is_bare` pods has no packages but Spark's.
"""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pyspark

_JARS = Path(pyspark.__file__).parent / "jars" / "*"
_BACKEND = "org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend"
_PATH = re.compile(r"/api/v1/namespaces/[^/]+/(?P<kind>\w+)(?:/(?P<name>[^/]+))?")


class FakeKubernetes:
    """The server and its pods. `room` is the number of pods that have a node; the others stay pending."""

    def __init__(
        self, folder: Path, room: int = 100, pending_seconds: float = 0.0, *, is_bare: bool = False
    ) -> None:
        self.folder, self.room, self.pending_seconds, self.is_bare = folder, room, pending_seconds, is_bare
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._born: dict[str, float] = {}
        self._lock = threading.RLock()
        handler = type("Handler", (_Handler,), {"cluster": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def master(self) -> str:
        return f"k8s://http://127.0.0.1:{self._server.server_address[1]}"

    @property
    def running(self) -> list[str]:
        """Names of the pods whose process lives, in the order of their start."""
        return [name for name, process in self.processes.items() if process.poll() is None]

    def kill(self, name: str) -> None:
        """Ends a pod as a lost node does."""
        self.processes[name].send_signal(signal.SIGKILL)

    def __enter__(self) -> "FakeKubernetes":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        for process in self.processes.values():
            process.kill()
            process.wait()

    def create(self, kind: str, made: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            name = made["metadata"]["name"]
            made["metadata"] |= {"uid": name, "namespace": "default", "resourceVersion": "1"}
            made["metadata"]["creationTimestamp"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            self.objects[kind, name] = made
            self._born[name] = time.monotonic()
            return self.read(kind, name) or made

    def read(self, kind: str, name: str) -> dict[str, Any] | None:
        with self._lock:
            found = self.objects.get((kind, name))
            if found is not None and kind == "pods":
                found["status"] = self._status(name, found)
            return found

    def select(self, kind: str, selector: str) -> list[dict[str, Any]]:
        wanted = [term for term in selector.split(",") if term]
        with self._lock:
            found = [self.read(kind, name) for of, name in list(self.objects) if of == kind]
        return [each for each in found if each and all(_has(each, term) for term in wanted)]

    def delete(self, kind: str, name: str) -> None:
        with self._lock:
            self.objects.pop((kind, name), None)
            process = self.processes.get(name)
        if process is not None:
            process.terminate()

    def _status(self, name: str, pod: dict[str, Any]) -> dict[str, Any]:
        process = self.processes.get(name)
        if process is None:
            waited = time.monotonic() - self._born[name]
            if waited < self.pending_seconds or len(self.running) >= self.room:
                return {"phase": "Pending"}
            process = self.processes[name] = self._start(name, pod)
        code, container = process.poll(), pod["spec"]["containers"][0]["name"]
        state: dict[str, Any] = {"running": {}}
        if code is not None:
            # Kubernetes reports a signal as 128 plus its number.
            state = {"terminated": {"exitCode": 128 - code if code < 0 else code, "reason": "Error"}}
        phase = "Running" if code is None else "Succeeded" if code == 0 else "Failed"
        statuses = [{"name": container, "image": "none", "ready": code is None, "state": state}]
        return {"phase": phase, "podIP": "127.0.0.1", "containerStatuses": statuses}

    def _start(self, name: str, pod: dict[str, Any]) -> "subprocess.Popen[bytes]":
        """Starts the executor as the entry point of Spark's image does."""
        given = pod["spec"]["containers"][0].get("env", ())
        values = {each["name"]: each["value"] for each in given if each.get("value") is not None}
        options = [values[key] for key in sorted(values) if key.startswith("SPARK_JAVA_OPT_")]
        work = self.folder / name
        work.mkdir(parents=True)
        command = ["java", *options, f"-Xmx{values['SPARK_EXECUTOR_MEMORY']}", "-cp", str(_JARS), _BACKEND]
        for option, key in {
            "--driver-url": "SPARK_DRIVER_URL",
            "--executor-id": "SPARK_EXECUTOR_ID",
            "--cores": "SPARK_EXECUTOR_CORES",
            "--app-id": "SPARK_APPLICATION_ID",
            "--resourceProfileId": "SPARK_RESOURCE_PROFILE_ID",
        }.items():
            command += [option, values[key]]
        command += ["--hostname", "127.0.0.1", "--podName", name]
        local = {"SPARK_LOCAL_IP": "127.0.0.1", "SPARK_LOCAL_DIRS": str(work)}
        if self.is_bare:
            # Of Python, Spark's image holds only Spark's own packages.
            packages = work / "spark"
            packages.mkdir()
            for name in ("pyspark", "py4j"):
                (packages / name).symlink_to(_JARS.parents[2] / name)
            local |= {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(packages)}
        else:
            local["PYSPARK_PYTHON"] = sys.executable
        with (work / "log").open("wb") as log:
            return subprocess.Popen(
                command, cwd=work, stdout=log, stderr=log, env=os.environ | values | local
            )  # fmt: skip


def _has(found: dict[str, Any], term: str) -> bool:
    labels = found["metadata"].get("labels") or {}
    if match := re.fullmatch(r"(\S+) (not)?in \((.*)\)", term):
        return (labels.get(match[1]) in match[3].split(",")) is (match[2] is None)
    name, _, value = term.replace("==", "=").partition("=")
    if name.endswith("!"):
        return bool(labels.get(name[:-1]) != value)
    return bool(labels.get(name.lstrip("!")) == value) if value else (name in labels)


class _Handler(BaseHTTPRequestHandler):
    cluster: FakeKubernetes

    def log_message(self, *_: object) -> None: ...

    def _answer(self, body: Any, code: int = 200) -> None:
        data = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _act(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        text = self.rfile.read(length)
        parts = urlsplit(self.path)
        match = _PATH.fullmatch(parts.path)
        if match is None:
            return self._answer({"kind": "Status", "code": 404, "message": self.path}, 404)
        kind, name = match["kind"], match["name"]
        if self.command == "POST":
            return self._answer(self.cluster.create(kind, json.loads(text)), 201)
        selector = parse_qs(parts.query).get("labelSelector", [""])[0]
        if name is None:
            found = self.cluster.select(kind, selector)
            if self.command == "DELETE":
                for each in found:
                    self.cluster.delete(kind, each["metadata"]["name"])
            names = {"pods": "PodList", "configmaps": "ConfigMapList"}
            listed = {"kind": names.get(kind, "PersistentVolumeClaimList"), "apiVersion": "v1"}
            return self._answer(listed | {"metadata": {"resourceVersion": "1"}, "items": found})
        known = self.cluster.read(kind, name)
        if known is None:
            return self._answer({"kind": "Status", "code": 404, "message": f"no {kind} {name}"}, 404)
        if self.command == "DELETE":
            self.cluster.delete(kind, name)
        elif self.command in {"PUT", "PATCH"} and "json-patch" not in self.headers["Content-Type"]:
            known["metadata"].setdefault("labels", {}).update(
                json.loads(text).get("metadata", {}).get("labels") or {}
            )
        return self._answer(known)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _act  # noqa: N815
