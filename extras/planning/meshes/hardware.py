"""Makes the hardware profile for a prediction: measures this machine, or takes given numbers."""

from __future__ import annotations

from collections.abc import Mapping

from ringspark.extras.planning.exchange_time import Link
from ringspark.extras.planning.meshes.machine import Machine, OperatorRates
from ringspark.extras.planning.meshes.mesh_calibration import calibrate_mesh, count_cores
from ringspark.extras.planning.meshes.profile import StepWork, Training
from ringspark.extras.planning.tables import describe_link, show_seconds

# Assumed for one core of a server without a measurement: 50 GFLOP/s and 10 GB/s.
ASSUMED = OperatorRates(launch=5e-6, flop=2e-11, byte=1e-10)


def make_machine(
    rates: OperatorRates,
    work: StepWork,
    link: Link,
    workers: int,
    between: Link | None = None,
    step_seconds: Mapping[int, float] | None = None,
    workers_per_host: int | None = None,
    cores_per_host: int | None = None,
) -> tuple[Machine, str]:
    """Returns a machine with the given numbers, and a sentence that describes them.

    Args:
        rates: Speeds of operators. If `step_seconds` is given, only the ratio of the speeds is used.
        step_seconds: Seconds of a step of the whole network on one worker, by its number of rows. If it is
            None, `rates` predict the time.
    """
    if step_seconds is not None:
        rates = rates.fit({rows: (work(rows), seconds) for rows, seconds in step_seconds.items()})
    ranks = min(workers, workers_per_host or workers)
    machine = Machine(
        rates=rates,
        inside={2: link},
        between=between,
        wire=link,
        ranks_per_host=ranks,
        cores_per_host=cores_per_host or ranks,
    )
    return machine, _facts(machine, workers, "given" if step_seconds is not None else "assumed")


def measure_machine(
    training: Training,
    work: StepWork,
    workers: int,
    repeats: int,
    link: Link | None = None,
    between: Link | None = None,
    step_seconds: Mapping[int, float] | None = None,
    workers_per_host: int | None = None,
    cores_per_host: int | None = None,
) -> tuple[Machine, str]:
    """Measures on this machine the numbers that are not given. Raises WorkerError if a process failed."""
    ranks = min(workers, workers_per_host or workers)
    cores = cores_per_host or count_cores()
    rows = () if step_seconds is not None else calibration_rows(training.config.batch_size)
    columns = training.inputs, training.labels
    found = calibrate_mesh(training.config, training.objects, *columns, rows, max(2, workers), repeats)
    shared = max(1.0, found.num_ranks / count_cores())
    # Seconds of a rank with its own core.
    measured = step_seconds or {n: seconds / shared for n, seconds in found.step_seconds.items()}
    rates = found.rates.fit({n: (work(n), seconds) for n, seconds in measured.items()})
    # The measured ranks may share cores more, or less, than the planned ranks.
    share = max(1.0, ranks / cores) / shared
    inside = {n: _scaled(own, share) for n, own in found.inside.items()} if link is None else {2: link}
    machine = Machine(
        rates=rates,
        inside=inside,
        between=between,
        wire=_scaled(found.wire, share) if link is None else link,
        ranks_per_host=ranks,
        cores_per_host=cores,
    )
    return machine, _facts(machine, workers, "measured here")


def calibration_rows(rows: int) -> tuple[int, int]:
    """Returns two numbers of rows to measure steps with, for a training with `rows` rows per step."""
    return max(1, rows // 8), max(2, rows // 2)


def _scaled(link: Link, factor: float) -> Link:
    return Link(alpha=link.alpha * factor, beta=link.beta * factor)


def _facts(machine: Machine, workers: int, source: str) -> str:
    rates = machine.rates
    near = max(machine.inside)
    between = "" if machine.between is None else f"; between hosts {describe_link(machine.between)}"
    crowding = machine.crowding(workers)
    shared = f"; {crowding:.3g} workers share a core" if crowding > 1 else ""
    return (
        f"Steps {source}: an operator takes {show_seconds(rates.launch)} plus its work at "
        f"{1e-9 / rates.flop:,.3g} billion operations and {1e-9 / rates.byte:,.3g} billion bytes per second; "
        f"{describe_link(machine.inside[near])}{between}{shared}."
    )
