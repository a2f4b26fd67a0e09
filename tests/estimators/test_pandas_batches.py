"""Rows that Spark before 4.1 passes to Python as pandas, see `inference.pandas_batches`."""

import pandas as pd
import pyarrow as pa

from ringspark.estimators.columns.feeds import Feed
from ringspark.estimators.inference.pandas_batches import _arrow
from ringspark.pipelines.kinds import TableColumn, TableRow


def test_the_row_of_a_table_keeps_its_missing_values():
    words = TableColumn(name="word", type="string", form="words", words=("a",))
    row = TableRow((TableColumn(name="number", center=0.0, scale=1.0), words))
    numbers, given = [1.0, None, None], ["a", None, "a"]
    spark_passes = pd.DataFrame({row.columns[0].source: numbers, words.source: given})
    for rows in (slice(0, 3), slice(1, 2)):  # the second has nothing but missing values
        (made,) = _arrow([Feed(name="table", kind=row)], (spark_passes[rows].reset_index(drop=True),))
        expected = pa.StructArray.from_arrays(
            [pa.array(numbers[rows], pa.float64()), pa.array(given[rows], pa.string())], list(spark_passes)
        )
        assert made.null_count == 0
        assert made.equals(expected)
