"""The journal of a search: file systems without hard links, its lock, and damage."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ringspark.extras.search.study import open_study

optuna = pytest.importorskip("optuna")

WITHOUT_LINKS = """
import errno, os, sys
from optuna.pruners import NopPruner
from ringspark.extras.search.study import open_study

def refuse_links(event, args):
    # As BlobFuse, SMB and the mount of DBFS do.
    if event in ("os.symlink", "os.link"):
        raise OSError(errno.EPERM, "this file system has no links")

sys.addaudithook(refuse_links)
study = open_study(sys.argv[1], False, NopPruner(), {"seed": "0"})
study.optimize(lambda trial: 0.5, n_trials=1)
print(len(study.trials))
"""


def test_a_file_system_without_links_holds_a_journal(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WITHOUT_LINKS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["journal.log"], "the lock is released"


LOCKED = """
import sys
from optuna.pruners import NopPruner
from optuna.storages.journal import JournalFileOpenLock
from ringspark.extras.search.study import open_study

file = f"{sys.argv[1]}/journal.log"
held, attempts = JournalFileOpenLock(file), []
held.acquire()

def release_at_third_attempt(event, args):
    if event == "open" and args[0] == f"{file}.lock":
        attempts.append(args)
        if len(attempts) == 3:
            held.release()  # fails if somebody has removed the lock

sys.addaudithook(release_at_third_attempt)
open_study(sys.argv[1], False, NopPruner(), {"seed": "0"})
assert len(attempts) > 2, "it did not wait"
"""


def test_the_lock_of_a_living_driver_is_waited_for(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LOCKED, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("lines", ['{"op_code": 0\n{}\n', "{}\n", "3\n"])
def test_a_damaged_journal_is_refused_in_one_sentence(tmp_path: Path, lines: str) -> None:
    (tmp_path / "journal.log").write_text(lines)
    with pytest.raises(ValueError, match=r"cannot resume .* journal.log is damaged \(.*\); set another"):
        open_study(str(tmp_path), False, optuna.pruners.NopPruner(), {"seed": "0"})
