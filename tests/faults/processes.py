"""The real processes of a training, found by an environment variable that all of them inherit."""

import os
from collections.abc import Sequence

import psutil

MARK = "RINGSPARK_FAULT_RUN"


def marked(mark: str) -> list[psutil.Process]:
    """Returns the live processes of one run."""
    found = []
    for process in psutil.process_iter():
        try:
            if lives(process) and process.environ().get(MARK) == mark:
                found.append(process)
        except psutil.Error:
            continue
    return found


def cmdline(process: psutil.Process) -> list[str]:
    """Returns the command line, also if the process has ended."""
    try:
        line: list[str] = process.cmdline()
    except psutil.Error:
        return []
    return line


def lives(process: psutil.Process) -> bool:
    """Returns whether it runs. A zombie, whose parent has not waited yet, has ended."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def pid_lives(pid: int) -> bool:
    """Returns whether the process runs and is not stopped."""
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_STOPPED)
    except psutil.Error:
        return False


def has_ended(pid: int) -> bool:
    """Returns whether the process has ended; a stopped one has not."""
    try:
        return not lives(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return True


def of_session(session: int) -> list[psutil.Process]:
    """Returns the live processes of a session."""
    found = []
    for process in psutil.process_iter():
        try:
            if lives(process) and os.getsid(process.pid) == session:
                found.append(process)
        except (psutil.Error, ProcessLookupError):
            continue
    return found


def executor_jvm(pid: int) -> psutil.Process:
    """Returns the executor of a Python worker: the JVM among its ancestors."""
    for parent in psutil.Process(pid).parents():
        if "CoarseGrainedExecutorBackend" in " ".join(cmdline(parent)):
            return parent
    raise AssertionError(f"process {pid} has no executor among its parents")


def send(process: psutil.Process | int, number: int) -> None:
    """Sends a signal; ignores ended processes."""
    pid = process if isinstance(process, int) else process.pid
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid} ({process.status()}): {' '.join(process.cmdline())[-160:]}"
    except psutil.Error:
        return f"{process.pid} (gone)"


def orphans(mark: str, owners: Sequence[int]) -> list[psutil.Process]:
    """Returns processes of the run that are stopped, or that no live owner has started."""
    left = []
    for process in marked(mark):
        try:
            above = [process.pid, *(parent.pid for parent in process.parents())]
            if process.status() == psutil.STATUS_STOPPED or not set(owners) & set(above):
                left.append(process)
        except psutil.Error:
            continue
    return left


def ranks_that_listen(mark: str) -> list[str]:
    """Returns ports on which Python workers of the run still listen without a training."""
    found = []
    for process in marked(mark):
        try:
            above = [" ".join(cmdline(parent)) for parent in process.parents()]
            # The daemon listens for its executor; a rank is a worker below it.
            if any("pyspark.worker" in line for line in above):
                found += ports_of(process)
        except psutil.Error:
            continue
    return found


def ports_of(process: psutil.Process) -> list[str]:
    """Returns the ports on which a process listens, and that the daemon that forked it has not open."""
    listening = [c for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    return [
        f"port {c.laddr.port} of {process.pid}" for c in listening if not _is_inherited(process, c.laddr.port)
    ]


def shared_memory_of(mark: str) -> set[str]:
    """Returns files of /dev/shm that the processes of a run have open or mapped."""
    found = set()
    for process in marked(mark):
        try:
            paths = [mapping.path for mapping in process.memory_maps()]
            paths += [file.path for file in process.open_files()]
        except (psutil.Error, OSError):
            continue
        found |= {path for path in paths if path.startswith("/dev/shm/")}
    return found


def _is_inherited(process: psutil.Process, port: int) -> bool:
    """Returns whether the daemon that forked this worker also has the port open."""
    parent = process.parent()
    return parent is not None and any(c.laddr.port == port for c in parent.net_connections("tcp"))
