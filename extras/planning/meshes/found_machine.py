"""The machine of a prediction: measured here, or made of figures that somebody gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ringspark.extras.planning.exchange_time import Link
from ringspark.extras.planning.meshes.machine import Machine, Rates
from ringspark.extras.planning.meshes.predict import StepWork, Training
from ringspark.extras.planning.meshes.rehearsal import cores_here, rehearse_meshes
from ringspark.extras.planning.report import link_words, show_seconds

# Of one core of a server, where nothing is measured: 50 billion operations and 10 billion bytes a second.
ASSUMED = Rates(launch=5e-6, flop=2e-11, byte=1e-10)


def given_machine(
    rates: Rates,
    work: StepWork,
    step_seconds: Mapping[int, float] | None,
    link: Link,
    between: Link | None,
    workers: int,
    workers_per_host: int | None,
    cores_per_host: int | None,
) -> tuple[Machine, str]:
    """Returns a machine of given figures, and what it rests on in a sentence.

    Args:
        rates: Rates of its operators; with `step_seconds` only their proportions count.
        step_seconds: Rows -> seconds of a step of the whole network on one worker; None takes the rates.
    """
    if step_seconds is not None:
        rates = rates.fitted({rows: (work(rows), seconds) for rows, seconds in step_seconds.items()})
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


def found_machine(
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
    """Measures on this machine what is not given; returns it and what it rests on in a sentence.

    Raises:
        WorkerError: A measuring process failed.
    """
    ranks = min(workers, workers_per_host or workers)
    cores = cores_per_host or cores_here()
    most = training.config.batch_size
    rows = () if step_seconds is not None else rehearsed_rows(most)
    found = rehearse_meshes(
        training.config,
        training.objects,
        training.inputs,
        training.labels,
        rows,
        max(2, workers),
        repeats,
    )
    shared = max(1.0, found.num_ranks / cores_here())
    # As if each rank had a core for itself.
    measured = step_seconds or {n: seconds / shared for n, seconds in found.step_seconds.items()}
    rates = found.rates.fitted({n: (work(n), seconds) for n, seconds in measured.items()})
    planned = Machine(
        rates=rates, inside={}, between=between, wire=found.wire, ranks_per_host=ranks, cores_per_host=cores
    )
    # Measured by ranks that may have shared cores more, or less, than those of the plan will.
    share = planned.crowding(workers) / shared
    inside = {n: _scaled(own, share) for n, own in found.inside.items()} if link is None else {2: link}
    machine = replace(planned, inside=inside, wire=_scaled(found.wire, share) if link is None else link)
    return machine, _facts(machine, workers, "measured here")


def rehearsed_rows(rows: int) -> tuple[int, int]:
    """Returns the rows of the two steps that are measured for one of so many rows over all workers."""
    return max(1, rows // 8), max(2, rows // 2)


def _scaled(link: Link, factor: float) -> Link:
    return Link(alpha=link.alpha * factor, beta=link.beta * factor)


def _facts(machine: Machine, workers: int, source: str) -> str:
    rates = machine.rates
    near = max(machine.inside)
    between = "" if machine.between is None else f"; between hosts {link_words(machine.between)}"
    crowding = machine.crowding(workers)
    shared = f"; {crowding:.3g} workers share a core" if crowding > 1 else ""
    return (
        f"Steps {source}: an operator {show_seconds(rates.launch)}, {1e-9 / rates.flop:,.3g} billion "
        f"operations and {1e-9 / rates.byte:,.3g} billion bytes a second; {link_words(machine.inside[near])}"
        f"{between}{shared}."
    )
