"""`sync` from the names of the settings that it replaced."""

from typing import Any

from ringspark.estimators.options.sync import AllReduce, Sync, write_earlier


def sync_of(**earlier: Any) -> Sync:
    """The `sync` that means the same as `sharding`, `gradientCompression`, `localSteps` or `consistency`."""
    return write_earlier(AllReduce(), earlier)
