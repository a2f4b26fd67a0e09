"""Fixtures of the tests of `SequenceWindows`."""

from spark_stages import spark_saves

__all__ = ["spark_saves"]
