"""Resources of the trainings: drivers, clusters, stores and reference runs, created on first use."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import meshes
import rows
import sockets
import stores
from cluster import Cluster
from scenarios import Fault, Place
from trainings import EPOCHS, LOCAL_CLUSTER, NUM_ROWS, NUM_WORKERS, TIMEOUT_SECONDS, Driver, Plan

STORE_TIMEOUT_SECONDS = 30.0

# The driver of each place; other places use "local".
_DRIVERS: dict[Place, str] = {
    "standalone": "standalone",
    "s3 run": "s3",
    "s3 shards": "s3",
    "no shared memory": "network",
    "four slots": "mesh",
}
# No process of Spark is hit there, so one JVM is enough.
MESH_MASTER = "local[4]"


def names_below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def _reference(plan: Plan, place: Place) -> str:
    if plan.network is not None:
        axes = plan.more["parallelism"].items()
        return "reference-" + "-".join(f"{axis}{size}" for axis, size in axes)
    return f"reference-{plan.collective}" + ("-by-network" if place == "no shared memory" else "")


class Lab:
    """Drivers, clusters, stores and reference runs, created on first use; a context manager.

    Args:
        epochs: Epochs of every training.
        timeout_seconds: Timeout of every training; on a busy machine, starting a rank takes longer than the
            timeout of a quiet machine.
        launch: The setting: a barrier stage, or ordinary tasks.
    """

    def __init__(
        self, epochs: int = EPOCHS, timeout_seconds: float = TIMEOUT_SECONDS, launch: str = "barrier"
    ) -> None:
        self.epochs = epochs
        self._launch = launch
        self._timeout_seconds = timeout_seconds
        self._dead: list[Driver] = []
        self._stack = ExitStack()
        self._drivers: dict[str, Driver] = {}
        self._references: dict[str, dict[str, Any]] = {}
        self._cluster: Cluster | None = None
        self._bucket: stores.Bucket | None = None
        self._disk: Path | None = None
        self.problems: list[str] = []

    def __enter__(self) -> Lab:
        folder = tempfile.TemporaryDirectory(prefix="ringspark-lab-")
        self.root = Path(self._stack.enter_context(folder))
        return self

    def __exit__(self, *exc: object) -> None:
        for name in list(self._drivers):
            self._end(name)
        for driver in self._dead:
            driver.close()
        if self._cluster is not None:
            self._cluster.close()
        if self._bucket is not None:
            self._bucket.close()
        self._stack.close()

    def start_anew(self) -> None:
        """Kills all drivers."""
        for name in list(self._drivers):
            self._drivers[name].kill()
            self._end(name)

    def reason_not_to(self, fault: Fault) -> str | None:
        """Returns why this machine cannot run the fault, or None."""
        if fault.target.startswith("network"):
            return sockets.reason_not_to()
        if fault.place == "small disk":
            try:
                self.disk()
            except OSError as error:
                return str(error)
        return None

    def driver(self, place: Place = "local-cluster") -> Driver:
        """Returns the live driver of a place, with all its executors."""
        name = _DRIVERS.get(place, "local")
        if name in self._drivers and not self._drivers[name].lives:
            if name == "standalone":
                self._end(name)  # the next driver gets the same mark
            else:
                # The next driver does not wait for all processes of the last one to end.
                self._dead.append(self._drivers.pop(name))
        self.heal(place)
        if name not in self._drivers:
            # Start one at a time, because each has four JVMs.
            for other in list(self._drivers):
                self._end(other)
            self._drivers[name] = self._start(name)
        driver = self._drivers[name]
        driver.wait_for_executors(0 if name == "mesh" else NUM_WORKERS)
        return driver

    def heal(self, place: Place) -> None:
        """Restarts Spark workers that a fault has ended."""
        if place == "standalone":
            self._cluster = self._cluster or Cluster(NUM_WORKERS)
            self._cluster.heal()

    def closed(self) -> list[str]:
        """Ends the remaining processes of dead drivers.

        Returns the processes that had not ended without help.
        """
        left = []
        while self._dead:
            left += self._dead.pop().close()
        return left

    def bucket(self) -> stores.Bucket:
        self._bucket = self._bucket or stores.Bucket()
        return self._bucket

    def disk(self) -> Path:
        """Returns a folder of 4 MiB."""
        if self._disk is None:
            self._disk = self._stack.enter_context(stores.small_disk(self.root / "disk", 4 << 20))
        return self._disk

    def shards(self) -> Path:
        """Returns the shards of all trainings on the local disk. They may be copied but not changed."""
        folder = self.root / "shards"
        if not folder.exists():
            next(iter(self._drivers.values())).write_shards(str(folder))
        return folder

    def reference(self, driver: Driver, like: Plan, place: Place) -> dict[str, Any]:
        """Returns the weights of the undisturbed training, whose ranks add in the same order."""
        key = _reference(like, place)
        if key not in self._references:
            folder = self.root / key
            plan = replace(like, run=str(folder / "run"), diary=folder / "diary")
            plan.nothing_comes()
            answer = driver.fit(plan)
            assert answer["ok"], answer
            problems = rows.check(plan.lines(), NUM_ROWS).problems
            assert not problems, problems
            self._references[key] = answer["weights"]
        return self._references[key]

    def names(self, plan: Plan, place: Place) -> set[str]:
        """Files in the undisturbed run's folder."""
        return names_below(self.root / _reference(plan, place) / "run")

    def plan(self, name: str, collective: str, max_restarts: int = 3, mesh: str = "") -> Plan:
        """Returns a training with separate files.

        Args:
            mesh: A key of `meshes.MESHES`; if empty, every rank has a whole small network.
        """
        folder, more = self.root / name, {}
        if spread := meshes.MESHES.get(mesh):
            more = {"network": spread.network(), "more": spread.settings(), "num_workers": meshes.NUM_WORKERS}
        more["more"] = {**more.get("more", {}), "launch": self._launch}
        return Plan(
            **more,
            run=str(folder / "run"),
            shards=str(self.root / "shards"),
            diary=folder / "diary",
            collective=collective,
            epochs=self.epochs,
            max_restarts=max_restarts,
            timeout_seconds=self._timeout_seconds,
        )

    def placed(self, plan: Plan, fault: Fault, name: str) -> Plan:
        """Returns the plan with the files at the fault's location."""
        if fault.place == "s3 run":
            # Heartbeats go there too. The store's fault and the client's retries must not look like a hang.
            patience = max(plan.timeout_seconds, STORE_TIMEOUT_SECONDS)
            return replace(plan, run=f"s3://bucket/{name}", timeout_seconds=patience)
        if fault.place == "s3 shards":
            return replace(plan, shards=self.bucket().upload(self.shards(), "shards"))
        if fault.place == "small disk":
            return replace(plan, run=str(self.disk() / name))
        if fault.target in ("manifest", "shard"):
            own = plan.diary.parent / "shards"
            shutil.copytree(self.shards(), own)
            return replace(plan, shards=str(own))
        return plan

    def _start(self, name: str) -> Driver:
        if name == "standalone":
            assert self._cluster is not None
            return Driver(self._cluster.url, keepers=self._cluster.pids, mark=self._cluster.mark)
        if name == "s3":
            return Driver(LOCAL_CLUSTER, self.bucket().environment)
        if name == "mesh":
            return Driver(MESH_MASTER)
        return Driver(LOCAL_CLUSTER, {"RINGSPARK_SHARED_MEMORY": "0"} if name == "network" else None)

    def _end(self, name: str) -> None:
        left = self._drivers.pop(name).close()
        self.problems += [f"left over after the driver: {line}" for line in left]
