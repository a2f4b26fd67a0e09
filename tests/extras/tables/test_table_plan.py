"""What a network gets of a column, by the rows that are held out."""

import random
from typing import Any

import pytest
from pyspark.sql import functions as F

from ringspark.extras.tables.table_plan import plan_table


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(
    ("held", "use"), [("row % 7 = 0", "number and category"), ("day >= 60", "number")], ids=["any", "newest"]
)
def test_numbers_of_a_day_are_ids_only_if_the_day_comes_back(spark: Any, held: str, use: str) -> None:
    draw = random.Random(0)
    # The readings of 80 days repeat in later days, but what the label owes to the day does not.
    effects = [draw.gauss(0, 1) for _ in range(80)]
    readings = draw.sample(range(60), 60)
    days = [(row, row % 80) for row in range(4_000)]
    rows = [(row, d, float(readings[d % 60]), effects[d] + draw.gauss(0, 0.3)) for row, d in days]
    frame = spark.createDataFrame(rows, "row int, day int, reading double, label double")
    plan = plan_table(frame, ["reading"], F.expr(held), F.col("label"))
    assert [found.use for found in plan.uses] == [use]
