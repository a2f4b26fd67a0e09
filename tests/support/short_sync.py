"""Short names of `sync`, for lists of cases."""

from typing import Any

from ringspark.estimators.options.sync import (
    AllReduce,
    Hogwild,
    LocalTraining,
    ParameterServer,
    Sync,
    shard_state,
)


def sync_of(*, sharding: str = "none", local: Any = 1, apart: Any = "bsp") -> Sync:
    """Returns a `Sync` from a short name; give at most one argument.

    Args:
        sharding: What ZeRO shards.
        local: Steps between two averages, or options named 'average', 'diloco' or 'elastic'.
        apart: 'asp', 'hogwild', or options with the name 'ssp', 'asp' or 'hogwild'; 'bsp' for none.
    """
    if local != 1:
        given = local if isinstance(local, dict) else {"steps": local}
        name = {"average": "localsgd", "elastic": "elasticaveraging"}.get(given.get("name", "average"))
        return LocalTraining.of(given | ({"name": name} if name else {}))
    given = dict(apart) if isinstance(apart, dict) else {"name": apart}
    name = given.pop("name")
    if name == "bsp":
        return shard_state(sharding) if sharding != "none" else AllReduce()
    return Hogwild() if name == "hogwild" else ParameterServer(**given)
