"""The setting that lets workers run ahead of each other, by a parameter server or in shared memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ringspark.estimators.names import nearest
from ringspark.estimators.parallel.consistency import CONSISTENCIES, CORRECTIONS
from ringspark.estimators.training.settings.declaration import Setting


def _consistency(value: Any) -> dict[str, Any]:
    """Returns the setting with all options of its name."""
    given = {"name": value} if isinstance(value, str) else value
    if not isinstance(given, Mapping):
        raise TypeError(f"consistency must be a name or a dict with a name, got {value!r}")
    name = given.get("name")
    if not isinstance(name, str) or name not in CONSISTENCIES:
        raise ValueError(
            f"consistency must be one of {', '.join(CONSISTENCIES)}, got {name!r}"
            f"{nearest(str(name), CONSISTENCIES)}"
        )
    options = CONSISTENCIES[name]
    for key in given:
        if key != "name" and key not in options:
            raise ValueError(f"consistency {name!r} takes the options {list(options)}, got {key!r}")
    found = {"name": name, **options, **given}
    staleness = found.get("staleness", 0)
    is_count = isinstance(staleness, int) and not isinstance(staleness, bool) and staleness >= 0
    if not is_count:
        raise ValueError(
            "consistency 'ssp' needs its staleness, the most steps ahead of the slowest worker, such as "
            f"{{'name': 'ssp', 'staleness': 3}}, got {staleness!r}"
        )
    if found.get("correction", "none") not in CORRECTIONS:
        raise ValueError(
            f"consistency's correction must be one of {', '.join(CORRECTIONS)}, got {found['correction']!r}"
        )
    return found


CONSISTENCY = Setting[dict[str, Any]](
    name="consistency",
    field="consistency",
    words="how far apart the workers may run: 'bsp' (all take each step together), {'name': 'ssp', "
    "'staleness': s} (a parameter server; nobody reads more than s steps ahead of the slowest), 'asp' (the "
    "same without a bound) or 'hogwild' (all write into one memory of one host, without a lock); 'ssp' and "
    "'asp' take 'correction': 'staleness', which lowers the rate of late gradients",
    default={"name": "bsp"},
    convert=_consistency,
    without_effect=(
        lambda given: given["consistency"]["name"] != "bsp" and given["numWorkers"] == 1,
        "there is one worker",
    ),
)
