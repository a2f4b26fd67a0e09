"""A session's setting of field IDs while several fits read tables in it."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
from pyspark.sql.types import LongType, StructField, StructType

from ringspark.extras.external_tables.in_place.file_scan import FIELD_ID
from ringspark.extras.external_tables.in_place.listing import Listing
from ringspark.extras.external_tables.in_place.table_frame import _BY_IDS, reads_field_ids
from ringspark.pipelines.table_files import TableSource

pytestmark = pytest.mark.spark


@pytest.mark.parametrize("first_ends_first", [True, False])
def test_the_last_of_two_readers_restores_the_setting(spark: Any, first_ends_first: bool) -> None:
    schema = StructType([StructField("id", LongType(), metadata={FIELD_ID: 1})])
    source = TableSource(uri="u", format="delta", version=1)
    listing = Listing(source=source, schema=schema, files=(), folder_columns={}, file_schema=schema)
    before = {name: spark.conf.get(name) for name in _BY_IDS}
    settings = set(spark.conf.getAll)
    readers = [ExitStack(), ExitStack()]
    for reader in readers:
        reader.enter_context(reads_field_ids(spark, listing))
    for reader in readers if first_ends_first else readers[::-1]:
        assert {name: spark.conf.get(name) for name in _BY_IDS} == _BY_IDS
        reader.close()
    assert {name: spark.conf.get(name) for name in _BY_IDS} == before
    assert set(spark.conf.getAll) - settings <= set(_BY_IDS)
