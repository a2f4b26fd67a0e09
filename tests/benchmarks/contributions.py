"""Seconds per million rows of a table: `transform`, with `contributionsCol`, and `compare_inputs`.

    make bench ARGS="contributions --rows 20000 --columns 10"

The columns are the last ones of `tests/support/mixed_table.py`, and `fit` chooses the network.
"""

from __future__ import annotations

import tempfile

import harness
import mixed_table

from ringspark.estimators import TorchClassifier
from ringspark.jobs import cli


def main() -> None:
    """Fits one epoch, then measures in interleaved rounds."""
    options = harness.parse(__doc__, rows=(20_000, 500), repeats=(3, 1), columns=(10, 3))
    with (
        tempfile.TemporaryDirectory() as folder,
        cli.spark("ringspark bench contributions", harness.MASTER) as spark,
    ):
        names = [*mixed_table.NUMBERS, *mixed_table.WORDS][-options.columns :]
        frame = mixed_table.make(spark, options.rows).select("label", *names).repartition(2).cache()
        stage = TorchClassifier(epochs=1, storageUri=folder, showProgress=False)
        model = stage.fit(frame.limit(2_000))
        explained = model.copy().setContributionsCol("why")
        cases = {
            "transform": lambda: write(model.transform(frame)),
            "with contributionsCol": lambda: write(explained.transform(frame)),
            "compare_inputs": lambda: model.compare_inputs(frame),
        }
        seconds = harness.measure_in_turns(
            {
                name: lambda case=case: harness.seconds_of(case) * 1e6 / options.rows  # type: ignore[misc]
                for name, case in cases.items()
            },
            options.repeats,
        )
    harness.print_table(
        f"contributions: seconds per million rows, {options.columns} columns, {options.rows:,} rows, "
        f"{harness.MASTER}, {options.repeats} rounds",
        ["", "median", "min", "max", "ratio to transform"],
        harness.rate_rows(seconds, "transform"),
    )


def write(frame: object) -> None:
    frame.write.format("noop").mode("overwrite").save()  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
