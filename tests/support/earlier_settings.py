"""Builds `sync` from the settings that it replaced."""

from typing import Any

from ringspark.estimators.options.sync import AllReduce, Sync, write_earlier


def sync_of(**earlier: Any) -> Sync:
    """Returns the `sync` equal to `sharding`, `gradientCompression`, `localSteps` or `consistency`."""
    return write_earlier(AllReduce(), earlier)
