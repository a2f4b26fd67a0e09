"""Where the code that torch compiles is kept on a worker.

torch's own place is a folder under /tmp whose name anyone can tell and make first, and a process loads shared
libraries from it. Ours belongs to this user alone, and serves later trainings on the host: what is in it has
not to be compiled again. A folder per host, since a home may be shared by hosts with other processors.
"""

from __future__ import annotations

import os
import platform
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from ringspark.estimators.environment import environment


@contextmanager
def own_code_folder() -> Iterator[None]:
    """Has torch and Triton keep what they compile in a folder of this user, if he has not named another.

    Without such a folder it is a temporary one, which is removed at the end.
    """
    from torch._inductor import codecache, config
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir
    from torch._inductor.utils import clear_caches

    default = default_cache_dir()
    places = {name: os.environ.get(name) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
    # torch itself writes its default into the environment.
    named, triton = (place if place and not place.startswith(default) else None for place in places.values())
    with ExitStack() as stack:
        folder = named or _folder_of_user()
        if folder is None:
            folder = stack.enter_context(
                TemporaryDirectory(prefix="ringspark-compiled-", ignore_cleanup_errors=True)
            )
            # The process must not remember files that will be gone.
            stack.callback(clear_caches)
            stack.enter_context(config.patch(cpp_cache_precompile_headers=False))
        # The headers' folder is a constant of torch's, which the environment does not move.
        codecache._HEADER_DIR = os.path.join(folder, "precompiled_headers")
        codecache._HEADER_LOCK_DIR = os.path.join(folder, "precompiled_headers", "locks")
        # An earlier training's headers may have been removed since.
        codecache._precompile_header.cache_clear()
        variables = dict(zip(places, (folder, triton or os.path.join(folder, "triton")), strict=True))
        stack.enter_context(environment(variables))
        yield


def _folder_of_user() -> str | None:
    """Makes the folder in the user's cache; returns None where there is none that only he can change."""
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").resolve()
        folder = cache / "ringspark" / f"compiled-{platform.node()}"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        own = folder.lstat()
        parents = [parent.lstat() for parent in folder.parents]
    except (OSError, RuntimeError):
        return None
    private = stat.S_ISDIR(own.st_mode) and own.st_uid == os.getuid() and not own.st_mode & 0o077
    # Whoever can rename a parent could put another folder in the place.
    kept = all(
        parent.st_uid in (0, os.getuid())
        and (not parent.st_mode & stat.S_IWOTH or parent.st_mode & stat.S_ISVTX)
        for parent in parents
    )
    return str(folder) if private and kept and os.access(folder, os.W_OK) else None
