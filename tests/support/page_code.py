"""The Python code of a Markdown page: what a test runs, and what it must not.

A page's blocks run from top to bottom in one namespace. A comment `<!-- run first: ... -->`, which readers
do not see, holds what the next blocks need and does not teach, such as a made-up table. A block that cannot
run says so behind its language, as "```python not run: needs YARN". `/shared/` in the code is a folder of
the test.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PATTERN = re.compile(
    r"^```python(?P<words>[^\n]*)\n(?P<code>.*?)^```$|^<!-- run first:\n(?P<hidden>.*?)^-->$",
    re.DOTALL | re.MULTILINE,
)
NOT_RUN = " not run: "


@dataclass(frozen=True)
class Block:
    """One block of a page.

    Attributes:
        line: The line of the page above its first one.
        code: What it says.
        words: What stands behind "python" in the fence's first line.
        hidden: Whether readers do not see it.
    """

    line: int
    code: str
    words: str = ""
    hidden: bool = False

    @property
    def reason(self) -> str:
        """Why it is not run; empty if it is."""
        return self.words.removeprefix(NOT_RUN) if self.words.startswith(NOT_RUN) else ""


def blocks(text: str) -> list[Block]:
    """Returns the Python blocks of a page in their order, hidden ones too."""
    return [
        Block(
            line=text[: match.start()].count("\n") + 1,
            code=match["code"] or match["hidden"] or "",
            words=match["words"] or "",
            hidden=match["hidden"] is not None,
        )
        for match in PATTERN.finditer(text)
    ]


def run(page: Path, folder: Path, **names: Any) -> dict[str, Any]:
    """Runs the page's blocks and returns the names that they leave.

    Args:
        page: The Markdown file.
        folder: What `/shared` is.
        names: What the page takes for given.
    """
    names["__name__"] = "__main__"  # classes of the page travel to workers by value, as a notebook's do
    for block in blocks(page.read_text()):
        if not block.reason:
            code = block.code.replace("/shared/", f"{folder}/")
            # Empty lines above, so that a traceback tells the page's own line.
            exec(compile("\n" * block.line + code, page.name, "exec"), names)
    return names
