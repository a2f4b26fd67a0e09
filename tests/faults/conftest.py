"""The harness's own modules lie beside the tests; `--import-mode=importlib` puts no folder on the path."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
