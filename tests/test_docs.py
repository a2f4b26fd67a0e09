"""The pages in docs/ that are printed from the package's own tables."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_page_of_settings_is_what_its_script_prints() -> None:
    script = ROOT / "scripts" / "show_settings.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    assert (ROOT / "docs" / "settings.md").read_text() == done.stdout, (
        "run `python scripts/show_settings.py > docs/settings.md`"
    )
