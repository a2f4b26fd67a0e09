"""Security of the ports: a gang of two with strangers at every port, compared with an undisturbed gang.

One stranger comes from another machine (on loopback: from 127.0.0.2) from before the ranks connect until the
end. One comes from the same machine after they have connected. They send garbage, HTTP, the first messages of
torch's rendezvous and of ours, Gloo's pair number and huge lengths, and keep their connections open. Target:
in every run the weights equal the quiet run's, and no resource grows.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import harness
from attacked_gang import run as attacked_gang

from ringspark.estimators import WorkerError


def main() -> None:
    """Runs one quiet and `--repeats` attacked gangs of each collective."""
    options = harness.parse(__doc__, steps=(300, 20))
    rows = []
    for collective in ("horovod", "torch"):
        with tempfile.TemporaryDirectory() as folder:
            quiet = attacked_gang(collective, Path(folder), steps=options.steps, attacked=False)
            for number in range(options.repeats):
                try:
                    found = attacked_gang(collective, Path(folder), steps=options.steps, attacked=True)
                except WorkerError as error:
                    rows.append(
                        [f"{collective} {number + 1}", "failed", str(error).splitlines()[0], *[""] * 4]
                    )
                    continue
                rows.append(
                    [
                        f"{collective} {number + 1}",
                        "equal" if found.weights == quiet.weights else "DIFFERENT",
                        f"{found.reached}",
                        f"{found.refused}",
                        f"{found.grown_bytes / 2**20:.1f}",
                        f"{found.grown_descriptors}",
                        f"{found.seconds:.1f} ({quiet.seconds:.1f})",
                    ]
                )
    harness.print_table(
        f"strangers: gang of 2, {options.steps} steps, weights against the quiet run",
        ["", "weights", "admitted", "rejected", "MiB grown", "descriptors", "s (quiet)"],
        rows,
    )


if __name__ == "__main__":
    main()
