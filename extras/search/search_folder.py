"""The folder of a search: its owner, and the settings that a resumed search must repeat."""

from __future__ import annotations

import uuid
from collections.abc import Mapping

from ringspark.estimators.launch.owner import read_owner, write_owner


class SearchFolder:
    """The folder that one driver at a time may write; `uri` is None for a search without a folder."""

    def __init__(self, uri: str | None) -> None:
        self.uri = uri
        self._token = uuid.uuid4().hex

    def claim(self) -> None:
        if self.uri is not None:
            write_owner(self.uri, self._token, 0)

    def check_owner(self) -> None:
        """Raises RuntimeError if another driver has taken over the search, so that nothing counts twice."""
        if self.uri is None:
            return
        owner = read_owner(self.uri)
        if owner is None or owner.token != self._token:
            raise RuntimeError(f"another driver has taken over the search in {self.uri!r}; fit there")


def check_settings(run_uri: str | None, old: Mapping[str, str], new: Mapping[str, str]) -> None:
    """Raises ValueError if a search to resume had other settings."""
    changed = [f"{name}: {old.get(name)} -> {value}" for name, value in new.items() if old.get(name) != value]
    if changed:
        raise ValueError(
            f"cannot resume the search in {run_uri!r}, because its settings differ: {'; '.join(changed)}; "
            "restore them, or set another runUri"
        )


def damage_error(run_uri: str | None, file: str, problem: object) -> ValueError:
    return ValueError(
        f"cannot resume the search in {run_uri!r}, because {file} is damaged ({problem}); set another runUri"
    )


def failure_reason(error: BaseException) -> str:
    """Returns the first line of an error, for the table of trainings."""
    return (str(error).splitlines() or [type(error).__name__])[0][:300]
