"""`ringspark.run`: calls a function on every rank of a gang, for a training loop of your own."""

from __future__ import annotations

import base64
import inspect
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
from pyspark.sql import SparkSession

from ringspark.estimators import run_layout, user_code
from ringspark.estimators.launch.python_daemon import choose_daemon
from ringspark.estimators.launch.slots import check_slots
from ringspark.estimators.launch.supervisor import Supervisor
from ringspark.estimators.run.folder import RunFolder
from ringspark.estimators.stages.storage_root import storage_root
from ringspark.estimators.training.settings.recovery import Recovery
from ringspark.estimators.training.settings.table import SETTINGS
from ringspark.estimators.training.settings.values import GangConfig
from ringspark.extras.functions.function_rank import Call, Script
from ringspark.extras.functions.function_task import FunctionTask
from ringspark.pipelines import storage
from ringspark.pipelines.folder_removal import discard
from ringspark.pipelines.spark_paths import resolve


def run(
    function: Callable[..., Any] | str | os.PathLike[str],
    *args: Any,
    numWorkers: int,
    useGpu: bool = False,
    maxRestarts: int = 0,
    timeoutSeconds: float = Recovery.timeout_seconds,
    storageUri: str | None = None,
    runUri: str | None = None,
    environment: Mapping[str, str] | None = None,
    spark: SparkSession | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Calls `function(*args, **kwargs)` on `numWorkers` ranks at the same time, each in a new process.

    The environment of each process has:

    - `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE`, `GROUP_RANK`, `MASTER_ADDR` and `MASTER_PORT`
      for `torch.distributed.init_process_group("gloo")`,
    - `HOROVOD_*` for `hvd.init()`,
    - `JAX_COORDINATOR_ADDRESS` for `jax.distributed.initialize(num_processes=..., process_id=...)`; pass
      `WORLD_SIZE` and `RANK` as integers,
    - `TF_CONFIG` for TensorFlow's `MultiWorkerMirroredStrategy`,
    - `CUDA_VISIBLE_DEVICES` with `useGpu`: the GPUs of all ranks on this host; a rank uses `cuda:LOCAL_RANK`,
    - `TORCHELASTIC_RESTART_COUNT`: number of restarts so far.

    Args:
        function: A function, or the path of a Python script on the driver, which gets `args` as text.
        numWorkers: Number of ranks; each needs a task slot of the cluster.
        useGpu: Whether every rank gets a GPU.
        maxRestarts: Number of restarts of all ranks after a process, an executor or a connection is lost. The
            function must load its own checkpoint. An exception of the function causes no restart.
        timeoutSeconds: A worker without a heartbeat for this long counts as lost. The function's run time has
            no limit.
        storageUri: Folder that driver and executors share, for heartbeats; a local master needs none.
        runUri: New folder that keeps the output of the ranks, as `logs/rank-<k>.txt`.
        environment: More environment variables for the ranks; they override the variables above.
        spark: The session; by default the active one.

    Returns:
        What the function returned on each rank, in rank order; None for a script.

    Raises:
        ValueError, TypeError: An argument is wrong, or the cluster has too few slots. Nothing was started.
        WorkerError: A rank failed; the message has its traceback and its last lines of output.
        TrainingCancelledError: Somebody cancelled the Spark job.
    """
    given = {
        "numWorkers": numWorkers,
        "useGpu": useGpu,
        "maxRestarts": maxRestarts,
        "timeoutSeconds": timeoutSeconds,
    }
    numWorkers, useGpu, maxRestarts, timeoutSeconds = (
        SETTINGS[name].check(value) for name, value in given.items()
    )
    loaded = _load(function, args, kwargs)
    call = Call(
        function=loaded, args=[*map(str, args)] if isinstance(loaded, Script) else args, kwargs=kwargs
    )
    variables = _check_environment(environment or {})
    pickled = user_code.dumps(call)
    session = spark or SparkSession.builder.getOrCreate()
    check_slots(session, numWorkers, useGpu)
    if runUri is None:
        folder = RunFolder.new(storage_root(session, storageUri))
    else:
        folder = RunFolder.given(storage.normalize(resolve(session, runUri)), resume=False)
    choose_daemon(session, useGpu)
    supervisor = Supervisor(
        spark=session,
        config=GangConfig(
            run_uri=folder.uri,
            num_workers=numWorkers,
            use_gpu=useGpu,
            max_restarts=maxRestarts,
            timeout_seconds=timeoutSeconds,
            # Only connects the tasks; the function makes its own process group.
            collective="torch",
        ),
        make_work=lambda config: FunctionTask(
            call=pickled,
            environment=variables,
            timeout_seconds=config.timeout_seconds,
            restarts=len(supervisor.restarts) + len(supervisor.preemptions),
        ),
        token=folder.token,
    )
    try:
        results = supervisor.run()
    finally:
        if runUri is None:
            folder.discard()
        else:  # the owner file first, because ranks stop writing when it is gone
            discard(storage.join(folder.uri, run_layout.OWNER), run_layout.PARTS)
            discard(storage.join(folder.uri, run_layout.HEARTBEAT), run_layout.PARTS)
    return [cloudpickle.loads(base64.b64decode(text)) for text in results]


def _check_environment(environment: Any) -> dict[str, str]:
    if not isinstance(environment, Mapping):
        raise ValueError(f"environment must be a dict of names and values, got {type(environment).__name__}")
    for name, value in environment.items():
        if not isinstance(name, str) or not name or "=" in name or value is None or "\0" in f"{name}{value}":
            # Without a value that may be a secret.
            given = f"{name!r}: None" if value is None else repr(name)
            raise ValueError(
                "environment takes names without '=' and values without a zero byte, as an operating system "
                f"does, got {given}; correct the entry, or leave it out"
            )
    return {name: str(value) for name, value in environment.items()}


def _load(function: Any, args: Any, kwargs: Any) -> Callable[..., Any]:
    if isinstance(function, (str, os.PathLike)):
        path = Path(function)
        if not path.is_file():
            raise ValueError(f"the driver has no script {str(path)!r}; give a file, or a function")
        if kwargs or not all(isinstance(arg, str | int | float | np.generic | os.PathLike) for arg in args):
            raise ValueError(
                f"the script {path.name!r} takes strings, numbers and paths, as a command line, got "
                f"{[*args, *(f'{name}={value!r}' for name, value in kwargs.items())]}; convert other values "
                "by str(), and write keywords as '--name', value"
            )
        return Script(path.name, path.read_bytes())
    if not callable(function):
        raise ValueError(f"run takes a function or the path of a script, got {type(function).__name__}")
    call: Callable[..., Any] = function
    try:
        signature = inspect.signature(call)
    except ValueError:
        return call  # some functions in C have no signature
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        name = getattr(call, "__name__", type(call).__name__)
        raise ValueError(f"{name} cannot be called with these arguments: {error}") from None
    return call
